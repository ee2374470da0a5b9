// Launches of the kernels of the sparse indexer.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "pagecore/ops/cuda/latent/latent_row_launch.hpp"

namespace pagecore::cuda {

struct IndexWriteLaunch {
  PcIndexWriteParams params = {};
  Grid grid;
};

struct IndexScoreLaunch {
  PcIndexScoreParams params = {};
  Float query_type = Float::F32;
  int64_t tiles = 0;  // of 16 heads, of index_scores_matrix; 0: index_scores
  Grid grid;
};

struct IndexSlotLaunch {
  PcIndexSlotParams params = {};
  Grid grid;
};

// Arguments of index_scores: a query [token, head, dim], weights [token, 1, head] and keys [block, token, 1, dim].
struct IndexScoreCall {
  TokenArray query;
  TokenArray weights;
  Cache keys;
  ScalePlane scales;
  Table table;
  Indices seq_lens;
  Indices rows;
  Indices cu_query_lens;
  bool causal = true;
  char* out = nullptr;  // float32
  int64_t out_stride = 0;
  int64_t width = 0;
};

// Positions [token, n]; strides count bytes.
struct PositionArray {
  const char* data = nullptr;
  int64_t num_tokens = 0;
  int64_t width = 0;
  int64_t stride = 0;
  bool wide = false;
};

[[nodiscard]] inline IndexWriteLaunch index_write_launch(const TokenArray& key, const Cache& keys,
                                                         const ScalePlane& scales, const Indices& slots) {
  IndexWriteLaunch launch;
  PcIndexWriteParams& params = launch.params;
  params.key = internal::new_rows(key);
  params.keys = address_of(keys.data);
  params.block_stride = keys.block_stride;
  params.token_stride = keys.token_stride;
  params.scales = address_of(scales.data);
  params.scale_block_stride = scales.block_stride;
  params.scale_token_stride = scales.token_stride;
  params.slots = internal::device_slots(slots, keys.num_blocks, keys.block_size);
  const uint64_t bits = internal::place_bits(params.keys, keys.block_stride, keys.token_stride);
  params.in_vectors = internal::moves_eight(bits, keys.dim, 1) ? 1 : 0;
  const auto chunks = static_cast<uint64_t>(ceil_div(keys.dim, 8));
  params.lanes_shift = std::min<pc_int32>(5, std::bit_width(chunks - 1));
  launch.grid = {ceil_div(slots.size, kThreads >> params.lanes_shift), 1, 1};
  return launch;
}

namespace internal {

// Return the tiles of 16 heads that a matrix kernel has for a call; 0 if it does not serve the call.
inline int64_t matrix_tiles(const IndexScoreCall& call) {
  const TokenArray& query = call.query;
  const uint64_t rows = address_of(query.data) | bits_of(query.token_stride) | bits_of(query.head_stride);
  const uint64_t keys = place_bits(address_of(call.keys.data), call.keys.block_stride, call.keys.token_stride);
  const bool fits = query.type != Float::F32 && call.keys.type == DType::F8E4M3FN && query.dim == PC_INDEX_DIM &&
                    query.num_heads <= 64 && allows(rows, 16) && allows(keys, 16);
  return !fits ? 0 : query.num_heads <= 32 ? 2 : 4;
}

// Keys of a block of threads: few enough that the blocks fill the device, and a multiple of those of its warps.
inline int64_t keys_per_block(int64_t width, int64_t num_tokens, int64_t num_multiprocessors) {
  constexpr int64_t kLeast = 128, kMost = 2048, kBlocks = 4;  // blocks for each multiprocessor
  const int64_t wanted = kBlocks * num_multiprocessors;
  const int64_t each = ceil_div(width, std::max<int64_t>(1, ceil_div(wanted, num_tokens)));
  return ceil_div(std::clamp(each, kLeast, kMost), PC_INDEX_TILE) * PC_INDEX_TILE;
}

}  // namespace internal

[[nodiscard]] inline IndexScoreLaunch index_score_launch(const IndexScoreCall& call, int64_t num_multiprocessors) {
  IndexScoreLaunch launch;
  PcIndexScoreParams& params = launch.params;
  const TokenArray& query = call.query;
  PC_EXPECTS(call.width <= kMaxUnits && query.num_tokens <= kMaxUnits, ShapeError, "query has ", query.num_tokens,
             " tokens and out ", call.width, " columns; on CUDA at most ", kMaxUnits, " are supported: split the call");
  params.query = device_tokens(query);
  params.query_type = static_cast<PcFloat>(query.type);
  params.weights = address_of(call.weights.data);
  params.weight_stride = call.weights.token_stride / size_of(call.weights.type);
  params.weight_type = static_cast<PcFloat>(call.weights.type);
  params.keys = address_of(call.keys.data);
  params.block_stride = call.keys.block_stride;
  params.token_stride = call.keys.token_stride;
  const bool has_codes = call.keys.type == DType::F8E4M3FN;
  params.key_type = has_codes ? PC_INDEX_E4M3 : static_cast<pc_int32>(call.keys.type);
  params.scales = address_of(call.scales.data);
  params.scale_block_stride = call.scales.block_stride;
  params.scale_token_stride = call.scales.token_stride;
  params.batch = sequence_batch(call.table, call.seq_lens, call.rows, call.cu_query_lens, call.seq_lens.size,
                                call.keys.num_blocks, call.keys.block_size);
  params.out = address_of(call.out);
  params.out_stride = call.out_stride / 4;
  params.num_heads = clamped(query.num_heads);
  params.dim = clamped(query.dim);
  params.num_tokens = clamped(query.num_tokens);
  params.width = clamped(call.width);
  params.causal = call.causal ? 1 : 0;
  const int64_t query_bytes = 4 * size_of(query.type), key_bytes = 4 * size_of(call.keys.type);
  const uint64_t rows = params.query.data | bits_of(query.token_stride) | bits_of(query.head_stride);
  const uint64_t keys = internal::place_bits(params.keys, call.keys.block_stride, call.keys.token_stride);
  params.in_vectors = query.dim % 4 == 0 && allows(rows, query_bytes) && allows(keys, key_bytes) ? 1 : 0;
  launch.query_type = query.type;
  launch.tiles = internal::matrix_tiles(call);
  if (query.num_tokens == 0 || call.width == 0) return launch.grid = {0, 0, 0}, launch;
  const int64_t each = internal::keys_per_block(call.width, query.num_tokens, num_multiprocessors);
  params.keys_per_block = static_cast<pc_int32>(each);
  const int64_t ranges = ceil_div(call.width, each);
  launch.grid = {ranges, grid_rows(query.num_tokens, ranges), 1};
  return launch;
}

[[nodiscard]] inline IndexSlotLaunch index_slot_launch(const PositionArray& positions, const Table& table,
                                                       const Indices& rows, const Indices& cu_query_lens,
                                                       int64_t num_sequences, int64_t block_size, char* out) {
  IndexSlotLaunch launch;
  PcIndexSlotParams& params = launch.params;
  const int64_t count = positions.num_tokens * positions.width;
  PC_EXPECTS(count <= kMaxUnits, ShapeError, "positions holds ", count, " positions; on CUDA at most ", kMaxUnits,
             " are supported: split the call");
  params.positions = address_of(positions.data);
  params.position_stride = positions.stride / index_size(positions.wide);
  params.wide = positions.wide;
  params.out = address_of(out);
  params.batch = sequence_batch(table, {}, rows, cu_query_lens, num_sequences, INT32_MAX, block_size);
  params.num_positions = count;
  params.width = make_divisor(std::max<int64_t>(positions.width, 1));
  launch.grid = {ceil_div(count, kThreads), 1, 1};
  return launch;
}

}  // namespace pagecore::cuda
