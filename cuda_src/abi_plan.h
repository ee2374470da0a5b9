// A plan on CUDA: what lies where in its one buffer, and how work is cut into shares. Read by g++ and by NVRTC, so that
// a plan made on the host and one made on the device are the same thing.
//
//   PcPlanHead | first_item of decode | first_item of prompts | mask_starts | items of decode, items of prompts |
//   tile_starts
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
  PC_PLAN_THREADS = 256,
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
  pc_int64 items;        // of PcWorkItem [max_items]
  pc_int64 tile_starts;  // of int32 [max_sequences + 1], which only the kernel uses
  pc_int64 num_bytes;
};

// What the kernel that plans is told: the lengths and options of the attention, and where the plan goes.
struct PcPlanParams {
  PcAttentionParams attention;
  PcPlanLayout layout;
  pc_address buffer;
};

static_assert(sizeof(PcPlanHead) == 32, "the layout is part of the ABI");
static_assert(sizeof(PcPlanLayout) == 96, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcPlanLayout, items) == 72, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcPlanParams, buffer) == 512, "the layout is part of the ABI");
static_assert(sizeof(PcPlanParams) == 520, "the layout is part of the ABI");

namespace pagecore {

constexpr pc_int32 kDecodeRows = 16;    // one tile of a matrix instruction
constexpr pc_int32 kPromptRows = 128;   // packed rows of a CTA
constexpr pc_int32 kDecodeFloor = 128;  // two rounds of four warps
constexpr pc_int32 kPromptFloor = 256;
constexpr pc_int32 kFoldTokens = 1024;  // of the pieces that batch-invariant rows are summed in
constexpr pc_int32 kItemCost = 64;      // what an item costs beside its keys, in keys

// Where a tile is cut at the borders of equal shares of cost, tile after tile: worker w has what lies between borders w
// and w + 1.
//
//   cost    |----- tile -----|-- tile --|-------------- tile --------------|
//   borders 0           1           2           3           4           5
//
// A border inside a tile cuts it at a multiple of `unit` keys if that leaves enough on both sides, and else moves to
// the nearer end of the tile.
struct ShareCuts {
  static constexpr pc_int32 kBefore = -1;  // the tile
  static constexpr pc_int32 kBehind = 0x7fffffff;

  pc_int64 cost_begin;  // of all tiles before
  pc_int64 cost;        // of this one
  pc_int64 total;       // of all
  pc_int32 num_workers;
  pc_int32 begin;  // keys
  pc_int32 end;
  pc_int32 unit;
  pc_int32 least;  // keys on either side of a cut

  // The borders inside: first_border() .. end_border() - 1. Each border lies in one tile.
  pc_int32 first_border() const { return border_from(cost_begin); }
  pc_int32 end_border() const { return border_from(cost_begin + cost); }

  // The key that border w cuts at, or kBefore or kBehind; it never falls with w.
  pc_int32 cut(pc_int32 w) const {
    const pc_int64 into = w * total / num_workers - cost_begin;  // >= 0
    const pc_int64 low = (static_cast<pc_int64>(begin) + least + unit - 1) / unit * unit;
    const pc_int64 high = end < least ? 0 : static_cast<pc_int64>(end - least) / unit * unit;
    if (low > high) return 2 * into < cost ? kBefore : kBehind;
    const pc_int64 key = begin + into - kItemCost;
    if (2 * key < begin + low) return kBefore;
    if (2 * key >= high + end) return kBehind;
    const pc_int64 nearest = (key + unit / 2) / unit * unit;
    return static_cast<pc_int32>(nearest < low ? low : nearest > high ? high : nearest);
  }

 private:
  // The first border at this cost or behind it; border w lies at w * total / num_workers, rounded down.
  pc_int32 border_from(pc_int64 at) const { return static_cast<pc_int32>((at * num_workers + total - 1) / total); }
};

}  // namespace pagecore
