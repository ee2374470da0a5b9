// Layout of a plan for CUDA: the capacities of its arrays, and their places in a buffer.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_src/abi/plan.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/native/rounding.hpp"
#include "pagecore/ops/plan.hpp"

namespace pagecore {

// Maximum of CTAs in a plan, so that plans in arrays of the caller have the same size on every device.
inline constexpr int64_t kMaxPlanCtas = 1024;

// Capacities, heads and CTAs that determine a layout.
struct CudaPlanShape {
  int64_t num_query_heads = 1;
  int64_t num_kv_heads = 1;
  bool batch_invariant = false;
  int64_t max_sequences = 0;
  int64_t max_tokens = 0;   // query rows of the batch
  int64_t decode_ctas = 1;  // resident CTAs
  int64_t prompt_ctas = 1;
  bool has_sinks = false;
  int64_t window_keys = 0;  // with sinks: keys of the window of a query
};

// Compute sizes from capacities. Let W workers share `total` cost, with a share s = total / W and pieces of at least s.
//
//   tiles            each sequence has at most one partial tile: <= max_sequences + max_tokens / query_tile
//   split by length  tiles of K keys > piece >= s have fewer than K / piece + 2 splits at multiples of `piece`; fewer
//                    than W tiles are that long, so they have fewer than total / s + 2 W = 3 W splits
//   split by borders W - 1 borders split at most W - 1 tiles: fewer than 2 W splits
//   batch-invariant  a tile remains whole if num_split_rows has no room for its splits
//   sinks            each tile has one split more, and partial rows for all of its splits: 2 for each query of a tile
//                    that is not cut, and one more for each split tile, which has two splits or more; batch-invariant,
//                    each query has a row for its sinks and each piece of its tile
//
// A split has at most query_tile partial rows.
[[nodiscard]] inline PcPlanLayout make_layout(const CudaPlanShape& shape) {
  const int64_t group = shape.num_query_heads / shape.num_kv_heads;
  const int64_t chunks = ceil_div(group, kPromptRows);
  PcPlanLayout layout = {};
  int64_t at = sizeof(PcPlanHead), splits = 0, split_rows = 0;
  const auto place = [&](int64_t num_bytes, int64_t multiple) {
    const int64_t begin = round_up(at, multiple);
    at = begin + num_bytes;
    return begin;
  };
  const auto section = [&](int64_t ctas, int64_t rows, pc_int32 floor) {
    const int64_t workers = std::max<int64_t>(1, ctas / (shape.num_kv_heads * chunks));
    const int64_t tile = std::max<int64_t>(1, rows / group);
    splits += 3 * workers;
    split_rows = std::max(split_rows, 3 * workers * tile);
    const int64_t first_item = place((workers + 1) * static_cast<int64_t>(sizeof(pc_int32)), 4);
    return PcPlanSection{static_cast<pc_int32>(workers), static_cast<pc_int32>(tile), floor,
                         static_cast<pc_int32>(first_item)};
  };
  layout.sections[PC_DECODE] = section(shape.decode_ctas, kDecodeRows, kDecodeFloor);
  layout.sections[PC_PROMPTS] = section(shape.prompt_ctas, kPromptRows, kPromptFloor);
  const PcPlanSection& prompts = layout.sections[PC_PROMPTS];
  // The largest number of splits has one row each.
  if (shape.batch_invariant) splits = split_rows;
  const int64_t max_tiles = shape.max_sequences + shape.max_tokens / prompts.query_tile;
  if (shape.has_sinks && shape.batch_invariant) {
    const int64_t pieces = (shape.window_keys + prompts.query_tile) / kFoldTokens + 2;
    splits = max_tiles * pieces;
    split_rows = shape.max_tokens * (pieces + 1);
  } else if (shape.has_sinks) {
    splits += max_tiles + splits / 2;
    split_rows += split_rows / 2 + 2 * shape.max_tokens;
  }
  const int64_t max_items = max_tiles + splits;
  const int64_t own_rows = shape.batch_invariant ? int64_t{prompts.num_workers} * prompts.query_tile : 0;
  PC_EXPECTS(shape.max_sequences < (1 << 24) && max_items < (1 << 26) && split_rows + own_rows < (1 << 30), ShapeError,
             "a plan for ", shape.max_sequences, " sequences and ", shape.max_tokens,
             " tokens exceeds the limits of its buffer: use smaller batches or fewer workers");
  layout.max_sequences = static_cast<pc_int32>(shape.max_sequences);
  layout.max_tokens = static_cast<pc_int32>(shape.max_tokens);
  layout.group = static_cast<pc_int32>(group);
  layout.head_chunks = static_cast<pc_int32>(chunks);
  layout.batch_invariant = shape.batch_invariant ? 1 : 0;
  layout.max_items = static_cast<pc_int32>(max_items);
  layout.num_split_rows = static_cast<pc_int32>(split_rows);
  layout.num_partial_rows = static_cast<pc_int32>(split_rows + own_rows);
  layout.mask_starts = static_cast<pc_int32>(place(8 * shape.max_sequences, 16));
  layout.items = place(max_items * static_cast<int64_t>(sizeof(PcWorkItem)), 16);
  layout.max_tiles = static_cast<pc_int32>(max_tiles);
  layout.max_borders = std::max(layout.sections[PC_DECODE].num_workers, prompts.num_workers);
  layout.tile_starts = place(4 * PC_NUM_SECTIONS * shape.max_sequences, 16);
  layout.tile_costs = place(8 * (int64_t{layout.max_tiles} + 1), 16);
  layout.tiles = place(int64_t{layout.max_tiles} * static_cast<int64_t>(sizeof(PcPlanTile)), 16);
  layout.borders = place(16 * (int64_t{layout.max_borders} + 1), 16);
  layout.num_bytes = place(0, 16);
  return layout;
}

// Bytes of a plan without the scratch memory of the kernel `plan`.
[[nodiscard]] inline int64_t planned_bytes(const PcPlanLayout& layout) { return layout.tile_starts; }

}  // namespace pagecore
