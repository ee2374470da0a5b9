// A plan on CUDA: what lies where in its one buffer, and how work is cut into shares. Read by g++ and by NVRTC, so that
// a plan made on the host and one made on the device are the same thing.
//
//   PcPlanHead | first_item of decode | first_item of prompts | mask_starts | items of decode, items of prompts |
//   scratch of the kernel: tile_starts | tile_costs | tiles | borders
//
// Sizes depend on capacities alone: a graph that was captured once serves every later step. `first_item` counts from
// the start of the items, which stand in a row, so that what is in use ends with the last of them. Of decode are the
// sequences that bring at most kDecodeRows packed rows (query * group), of prompts all others; batch-invariant plans
// have prompts only.
//
// A tile is one item or several, its splits; those that belong to one worker stand together, longest first or in the
// order of the batch. A tile's first partial row is `partial - split * query_count` of any of its splits. Splits of one
// launch have partial rows of their own; the two launches use the same ones, one after the other. Behind
// num_split_rows each worker of a batch-invariant plan has query_tile rows more, in which it folds the pieces of a tile
// that is not split.
#pragma once

#include "abi_attention.h"

enum PcSectionId : pc_int32 { PC_DECODE = 0, PC_PROMPTS = 1, PC_NUM_SECTIONS = 2 };

enum : pc_int32 {
  PC_PLAN_THREADS = 512,                            // a border each of one launch on most devices
  PC_PLAN_SHARED_BYTES = PC_PLAN_THREADS / 32 * 8,  // a sum for each warp
};

struct PcPlanHead {
  pc_int32 num_sequences;
  pc_int32 num_items[PC_NUM_SECTIONS];
  pc_int32 num_partial_rows[PC_NUM_SECTIONS];
  pc_int32 pad[3];
};

struct PcPlanSection {
  pc_int32 num_workers;  // the x axis of the grid
  pc_int32 query_tile;   // queries of an item at most
  pc_int32 split_floor;  // keys that make a split worth its merge
  pc_int32 first_item;   // byte in the buffer, here and below; of int32 [num_workers + 1]
};

struct PcPlanLayout {
  PcPlanSection sections[PC_NUM_SECTIONS];
  pc_int32 max_sequences;
  pc_int32 max_tokens;
  pc_int32 group;        // rows of a query: query heads of a key head
  pc_int32 head_chunks;  // the z axis of the grid of prompts: chunks of heads where a group is more than a tile's rows
  pc_int32 batch_invariant;  // 1 or 0
  pc_int32 max_items;
  pc_int32 num_split_rows;    // partial rows of splits
  pc_int32 num_partial_rows;  // and of workers
  pc_int32 mask_starts;       // of int64 [max_sequences]
  pc_int32 pad;
  pc_int64 items;  // of PcWorkItem [max_items]
  // From tile_starts on: scratch of the kernel, of one section at a time but for tile_starts. A plan that the host made
  // ends before it.
  pc_int64 tile_starts;  // of int32 [PC_NUM_SECTIONS, max_sequences]: tiles of the sequences before
  pc_int64 tile_costs;   // of int64 [max_tiles + 1]: cost of the tiles before
  pc_int64 tiles;        // of PcPlanTile [max_tiles]
  pc_int64 borders;      // of int32 [4, max_borders + 1]: tile and key of each border, cuts before it, keys of cuts
  pc_int32 max_tiles;    // of a section
  pc_int32 max_borders;  // workers of the section that has more
  pc_int64 num_bytes;
};

// Some queries of a sequence and the keys that any of them attends to.
struct PcPlanTile {
  pc_int32 sequence;
  pc_int32 query_begin;
  pc_int32 query_count;
  pc_int32 key_begin;
  pc_int32 key_end;
  pc_int32 pieces;      // items that the tile is cut into
  pc_int32 first_item;  // of the section
  pc_int32 partial;     // first partial row, if there are several pieces
};

// Parameters of the kernel that plans: the lengths and options of the attention, and the address of the plan.
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
static_assert(__builtin_offsetof(PcPlanParams, buffer) == 544, "the layout is part of the ABI");
static_assert(sizeof(PcPlanParams) == 552, "the layout is part of the ABI");

namespace pagecore {

constexpr pc_int32 kDecodeRows = 16;    // one tile of a matrix instruction
constexpr pc_int32 kPromptRows = 128;   // packed rows of a CTA
constexpr pc_int32 kDecodeFloor = 128;  // two rounds of four warps
constexpr pc_int32 kPromptFloor = 256;
constexpr pc_int32 kFoldTokens = 1024;  // of the pieces that batch-invariant rows are summed in
constexpr pc_int32 kItemCost = 64;      // what an item costs beside its keys, in keys

// Workers share the cost of all tiles equally: worker w has what lies between borders w and w + 1.
//
//   cost    |----- tile -----|-- tile --|-------------- tile --------------|
//   borders 0           1           2           3           4           5
struct Shares {
  pc_int64 total;  // cost of all tiles, above 0
  pc_int32 num_workers;

  // The cost before border w.
  pc_int64 cost_at(pc_int32 w) const { return w * total / num_workers; }

  // The first border with at least this cost before it. The borders of a tile are those from its first cost on to the
  // first cost of the next tile; each border lies in one tile.
  pc_int32 border_from(pc_int64 cost) const { return static_cast<pc_int32>((cost * num_workers + total - 1) / total); }
};

// Where the borders inside a tile cut it: at the nearest multiple of `unit` keys if that leaves enough on both sides,
// and else at the nearer end of the tile.
struct TileCuts {
  static constexpr pc_int32 kBefore = -1;  // the tile
  static constexpr pc_int32 kBehind = 0x7fffffff;

  pc_int32 begin;  // keys of the tile
  pc_int32 end;
  pc_int32 unit;   // a power of two
  pc_int32 least;  // keys on either side of a cut

  // The key that a border with `into` of the tile's `cost` before it cuts at, or kBefore or kBehind; it never falls
  // with `into`.
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
