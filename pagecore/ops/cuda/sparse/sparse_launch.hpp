// Parameters of the kernels of sparse selection, and the launches of moves between slots.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "cuda_src/abi/sparse.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"
#include "pagecore/ops/cuda/moves/move_launch.hpp"

namespace pagecore::cuda {

namespace internal {

[[nodiscard]] inline pc_int32 shift_of(int64_t size) {
  return std::has_single_bit(bits_of(size)) ? std::countr_zero(bits_of(size)) : -1;
}

}  // namespace internal

// New keys, or keys in the slots of a cache, and their summaries. Absent planes have no data.
struct KeySummaryPlanes {
  TokenArray key;
  Cache stored;  // of `key` if its data is absent
  Cache low;
  Cache high;
  Cache label;
  const char* channels = nullptr;  // on the device
};

// The heads and dims of the keys.
struct KeySizes {
  int64_t heads;
  int64_t dim;
};

[[nodiscard]] inline KeySizes key_sizes(const KeySummaryPlanes& planes) {
  if (planes.key.data == nullptr) return {planes.stored.num_heads, planes.stored.dim};
  return {planes.key.num_heads, planes.key.dim};
}

// Raises an error for sizes that summary_params does not support. A call has to check before it writes the keys.
inline void check_summary_sizes(const KeySummaryPlanes& planes, int64_t num_slots) {
  const auto [heads, dim] = key_sizes(planes);
  PC_EXPECTS(heads <= kMaxUnits / std::max({dim, planes.label.dim, int64_t{1}}) && num_slots < kMaxUnits, ShapeError,
             "a token has ", heads, " heads of ", dim, " and the call ", num_slots,
             " slots; on CUDA a token has fewer than ", kMaxUnits, " numbers, and a call fewer slots: split the call");
}

[[nodiscard]] inline PcSummaryParams summary_params(const KeySummaryPlanes& planes, const Indices& slots,
                                                    int64_t num_blocks, int64_t block_size) {
  const bool is_new = planes.key.data != nullptr;
  const auto [heads, dim] = key_sizes(planes);
  PcSummaryParams params = {};
  if (is_new) params.key = device_tokens(planes.key);
  if (!is_new) params.stored = device_cache(planes.stored);
  params.key_type = static_cast<PcFloat>(is_new ? planes.key.type : planes.stored.type);
  params.low = device_cache(planes.low);
  params.high = device_cache(planes.high);
  params.bound_type = static_cast<PcFloat>(planes.low.type);
  params.label = device_cache(planes.label);
  params.label_type = static_cast<PcFloat>(planes.label.type);
  params.channels = address_of(planes.channels);
  params.slots = device_indices(slots);
  params.num_slots = num_blocks * block_size;
  params.block_size = make_divisor(block_size);
  params.dim = make_divisor(dim);
  params.num_channels = make_divisor(std::max<int64_t>(planes.label.dim, 1));
  params.block_shift = internal::shift_of(block_size);
  params.num_heads = clamped(heads);
  return params;
}

// Summaries that score entries, and the batch. `low` is absent for labels.
struct ScoreSources {
  TokenArray query;
  Cache low;
  Cache high;
  Table table;
  Indices rows;
  Indices seq_lens;
  Indices cu_query_lens;
  const char* channels = nullptr;  // on the device
  int64_t block_size = 1;
  int64_t width = 0;
};

[[nodiscard]] inline bool loads_chunks(const Cache& plane) {
  const uint64_t bits =
      address_of(plane.data) | bits_of(plane.block_stride) | bits_of(plane.token_stride) | bits_of(plane.head_stride);
  return plane.dim % 8 == 0 && allows(bits, 16);
}

[[nodiscard]] inline PcScoreParams score_params(const ScoreSources& from) {
  const bool is_bounds = from.low.data != nullptr;
  PC_EXPECTS(from.high.dim <= PC_MAX_SCORED_DIM, UnsupportedOption, "the summaries of keys have ", from.high.dim,
             " numbers a head; on CUDA at most ", static_cast<int64_t>(PC_MAX_SCORED_DIM),
             " are supported: copy the arrays to the host");
  const int64_t heads = from.high.num_heads;
  PC_EXPECTS(std::max({from.query.num_tokens * heads, from.width, from.block_size, from.seq_lens.size}) < kMaxUnits,
             ShapeError, "query has ", from.query.num_tokens, " tokens, and a row of scores ", from.width,
             " numbers; on CUDA counts are below ", kMaxUnits, ": split the batch");
  PcScoreParams params = {};
  params.query = device_tokens(from.query);
  params.low = device_cache(from.low);
  params.high = device_cache(from.high);
  params.table = device_table(from.table);
  params.rows = device_indices(from.rows);
  params.seq_lens = device_indices(from.seq_lens);
  params.cu_query_lens = device_indices(from.cu_query_lens);
  params.channels = address_of(from.channels);
  params.width = clamped(from.width);
  params.num_tokens = clamped(from.query.num_tokens);
  params.num_sequences = clamped(from.seq_lens.size);
  params.num_kv_heads = clamped(heads);
  params.group = clamped(from.query.num_heads / heads);
  params.query_dim = clamped(from.query.dim);
  params.dim = clamped(from.high.dim);
  params.num_blocks = clamped(from.high.num_blocks);
  params.block_size = clamped(from.block_size);
  params.lanes_shift = std::min<pc_int32>(5, std::bit_width(bits_of((from.high.dim + 7) / 8 - 1)));
  params.in_vectors = loads_chunks(from.high) && (!is_bounds || loads_chunks(from.low)) ? 1 : 0;
  params.query_type = static_cast<PcFloat>(from.query.type);
  return params;
}

struct SlotLaunch {
  PcSlotParams params = {};
  Grid grid;
};

// Launches that move tokens between slots of each array [block, token, ...]. Slots are set by the caller.
[[nodiscard]] inline std::vector<SlotLaunch> slot_launches(const std::vector<BlockArray>& arrays) {
  std::vector<internal::MoveGroup> groups;
  for (const BlockArray& array : arrays) {
    if (internal::has_empty_axis(array)) continue;
    BlockArray token = array;  // a "block" of one token
    token.ndim = array.ndim - 1;
    std::copy(array.shape + 1, array.shape + array.ndim, token.shape);
    std::copy(array.strides + 1, array.strides + array.ndim, token.strides);
    token.num_blocks = 2;  // of which the alignment counts
    token.block_stride = static_cast<int64_t>(bits_of(array.block_stride) | bits_of(array.strides[0]));
    MovePlan plan = plan_blocks(token, token);
    plan.source_block_stride = array.block_stride;
    plan.target_block_stride = array.strides[0];
    internal::add_to_groups(groups, plan, array, array);
  }
  std::vector<SlotLaunch> launches;
  for (const internal::MoveShare& share : internal::shares_of(groups)) {
    SlotLaunch& launch = launches.emplace_back();
    const MovePlan& plan = share.group->plan;
    launch.params.shape = plan.shape;
    launch.params.block_stride = plan.source_block_stride;
    launch.params.token_stride = plan.target_block_stride;
    launch.params.num_slots = internal::fewest_blocks(arrays) * arrays[0].shape[0];
    launch.params.block_size = make_divisor(arrays[0].shape[0]);
    launch.params.block_shift = internal::shift_of(arrays[0].shape[0]);
    std::copy_n(share.group->sources.begin() + share.begin, share.size, launch.params.arrays);
    launch.grid = {ceil_div<int64_t>(plan.shape.num_units, kThreads), 1, share.size};
  }
  return launches;
}

}  // namespace pagecore::cuda
