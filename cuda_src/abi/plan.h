// Plans on CUDA: the layout of the buffer, and the division of work into shares. g++ and NVRTC compile this header, so
// that plans made on the host and on the device are identical.
//
//   PcPlanHead | first_item of decode | first_item of prompts | mask_starts | items of decode, items of prompts |
//   scratch of the kernel: tile_starts | tile_costs | tiles | borders
//
// Sizes depend only on capacities, so that a captured graph serves every later step. `first_item` counts from the start
// of the items. The items of both sections are contiguous, so that the used part of the buffer ends with the last item.
// The decode section has the sequences with at most kDecodeRows packed rows (query * group), the prompt section all
// others. Batch-invariant plans have only a prompt section.
//
// A tile is one item, or several: its splits. The items of one worker are contiguous, longest first or in the order of
// the batch. The first partial row of a tile is `partial - split * query_count` of any of its splits. Splits of one
// launch have partial rows of their own; the two launches use the same partial rows one after the other. After the
// num_split_rows rows of splits, each worker of a batch-invariant plan has query_tile rows of its own, in which it
// folds the pieces of a tile that is not split.
//
// With sink tokens, the first split of every tile is an item over the sinks, which the CTA joins with the items over
// the keys of the window. The worker of the tile's first piece has it. Every tile has partial rows then, and a
// batch-invariant plan splits every tile at every kFoldTokens, so that no worker folds.
#pragma once

#include "cuda_src/abi/attention.h"

enum PcSectionId : pc_int32 { PC_DECODE = 0, PC_PROMPTS = 1, PC_NUM_SECTIONS = 2 };

enum : pc_int32 {
  PC_PLAN_THREADS = 512,                            // on most devices, at least one for each border of a launch
  PC_PLAN_SHARED_BYTES = PC_PLAN_THREADS / 32 * 8,  // of BlockScan: one 64-bit sum for each warp
};

struct PcPlanHead {
  pc_int32 num_sequences;
  pc_int32 num_items[PC_NUM_SECTIONS];
  pc_int32 num_partial_rows[PC_NUM_SECTIONS];
  pc_int32 pad[3];
};

struct PcPlanSection {
  pc_int32 num_workers;  // the x axis of the grid
  pc_int32 query_tile;   // largest number of queries of an item
  pc_int32 split_floor;  // least number of keys for which a split is worth its merge
  pc_int32 first_item;   // byte offset in the buffer of int32 [num_workers + 1]
};

struct PcPlanLayout {
  PcPlanSection sections[PC_NUM_SECTIONS];
  pc_int32 max_sequences;
  pc_int32 max_tokens;
  pc_int32 group;        // query heads of a key head, which are the rows of a query
  pc_int32 head_chunks;  // z axis of the grid of prompts: more than 1 if a group has more heads than a tile has rows
  pc_int32 batch_invariant;  // 1 or 0
  pc_int32 max_items;
  pc_int32 num_split_rows;    // partial rows of splits
  pc_int32 num_partial_rows;  // of splits and of workers
  pc_int32 mask_starts;       // byte offset of int64 [max_sequences]
  pc_int32 pad;
  pc_int64 items;  // byte offset of PcWorkItem [max_items]
  // Byte offsets of the kernel's scratch. All but tile_starts are used for one section at a time. A plan made on the
  // host ends before tile_starts.
  pc_int64 tile_starts;  // int32 [PC_NUM_SECTIONS, max_sequences]: number of tiles of the sequences before
  pc_int64 tile_costs;   // int64 [max_tiles + 1]: cost of the tiles before
  pc_int64 tiles;        // PcPlanTile [max_tiles]
  pc_int64 borders;      // int32 [4, max_borders + 1]: tile and key of each border, cuts before it, keys of cuts
  pc_int32 max_tiles;    // of a section
  pc_int32 max_borders;  // the larger number of workers of the two sections
  pc_int64 num_bytes;
};

// Queries of a sequence, and the keys that at least one of them attends to.
struct PcPlanTile {
  pc_int32 sequence;
  pc_int32 query_begin;
  pc_int32 query_count;
  pc_int32 key_begin;
  pc_int32 key_end;
  pc_int32 pieces;      // items that the tile is cut into
  pc_int32 first_item;  // of the section
  pc_int32 partial;     // first partial row, if pieces > 1
};

// Parameters of the plan kernel: the lengths and options of the attention, and the address of the plan.
struct PcPlanParams {
  PcAttentionParams attention;
  PcPlanLayout layout;
  pc_address buffer;
};

static_assert(sizeof(PcPlanHead) == 32, "the layout is part of the ABI");
static_assert(sizeof(PcPlanLayout) == 128, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcPlanLayout, items) == 72, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcPlanLayout, max_tiles) == 112, "the layout is part of the ABI");
static_assert(sizeof(PcPlanTile) == 32, "the kernel reads a tile as two 16-byte vectors");
static_assert(__builtin_offsetof(PcPlanParams, buffer) == 688, "the layout is part of the ABI");
static_assert(sizeof(PcPlanParams) == 696, "the layout is part of the ABI");

namespace pagecore {

constexpr pc_int32 kDecodeRows = 16;    // rows of a matrix instruction
constexpr pc_int32 kPromptRows = 128;   // packed rows of a CTA
constexpr pc_int32 kDecodeFloor = 128;  // two rounds of four warps
constexpr pc_int32 kPromptFloor = 256;
constexpr pc_int32 kFoldTokens = 1024;  // keys of a piece of a batch-invariant row
constexpr pc_int32 kItemCost = 64;      // fixed cost of an item, in keys

// Workers get equal shares of the cost of all tiles: worker w gets the work between borders w and w + 1.
//
//   cost    |----- tile -----|-- tile --|-------------- tile --------------|
//   borders 0           1           2           3           4           5
struct Shares {
  pc_int64 total;  // cost of all tiles, above 0
  pc_int32 num_workers;

  // The cost before border w.
  pc_int64 cost_at(pc_int32 w) const { return w * total / num_workers; }

  // The first border with at least this cost before it. A border is in the tile whose range of costs contains it; each
  // border is in one tile.
  pc_int32 border_from(pc_int64 cost) const { return static_cast<pc_int32>((cost * num_workers + total - 1) / total); }
};

// Cuts of a tile at the borders inside it: at the nearest multiple of `unit` keys if at least `least` keys remain on
// both sides, else at the nearer end of the tile.
struct TileCuts {
  static constexpr pc_int32 kBefore = -1;          // the border moves to the begin of the tile
  static constexpr pc_int32 kBehind = 0x7fffffff;  // the border moves to the end of the tile

  pc_int32 begin;  // keys of the tile
  pc_int32 end;
  pc_int32 unit;   // a power of two
  pc_int32 least;  // keys on either side of a cut

  // Returns the key at which a border cuts the tile, or kBefore or kBehind, if `into` of the tile's `cost` lies before
  // the border. The result is non-decreasing in `into`.
  pc_int32 cut(pc_int64 into, pc_int64 cost) const {
    const pc_int64 whole = -static_cast<pc_int64>(unit);  // x & whole: the multiple of unit at or below x
    const pc_int64 low = (static_cast<pc_int64>(begin) + least + unit - 1) & whole;
    const pc_int64 high = end < least ? 0 : static_cast<pc_int64>(end - least) & whole;
    if (low > high) return 2 * into < cost ? kBefore : kBehind;
    const pc_int64 key = begin + into - kItemCost;
    if (2 * key < begin + low) return kBefore;
    if (2 * key >= high + end) return kBehind;
    const pc_int64 nearest = (key + unit / 2) & whole;
    return static_cast<pc_int32>(nearest < low ? low : nearest > high ? high : nearest);
  }
};

static_assert((kDecodeFloor & (kDecodeFloor - 1)) == 0 && (kPromptFloor & (kPromptFloor - 1)) == 0 &&
                  (kFoldTokens & (kFoldTokens - 1)) == 0,
              "units of cuts are powers of two");

}  // namespace pagecore
