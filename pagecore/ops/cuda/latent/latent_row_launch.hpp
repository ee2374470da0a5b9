// Launches of the kernels that write and read rows of latent caches.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda_src/abi/latent_rows.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"

namespace pagecore::cuda {

// The planes of a latent cache, [num_blocks, block_size, row]. Without `rope`, a row of `latent` holds both parts.
struct LatentPlaneArgs {
  BlockArray latent;
  BlockArray rope;
  bool has_rope = false;
  int32_t format = 0;  // PcLatentRowFormat
  int64_t latent_dim = 0;
  int64_t rope_dim = 0;
};

struct LatentWriteLaunch {
  PcLatentWriteParams params = {};
  Grid grid;
};

struct LatentGatherLaunch {
  PcLatentGatherParams params = {};
  Grid grid;
};

namespace internal {

// Return true if 8 numbers of `size` bytes can be moved at once, in units of at most 16 bytes.
inline bool moves_eight(uint64_t bits, int64_t dim, int64_t size) { return dim % 8 == 0 && allows(bits, 8 * size); }

inline PcNewRows new_rows(const TokenArray& rows) {
  const int64_t size = size_of(rows.type);
  PC_EXPECTS(rows.num_tokens <= INT32_MAX, ShapeError, "a call has ", rows.num_tokens, " tokens; on CUDA at most ",
             INT32_MAX, " are supported: split the call");
  PcNewRows result = {};
  result.data = address_of(rows.data);
  result.token_stride = rows.token_stride / size;
  result.type = static_cast<PcFloat>(rows.type);
  result.dim = clamped(rows.dim);
  const uint64_t stride = rows.num_tokens > 1 ? bits_of(rows.token_stride) : 0;
  result.in_vectors = moves_eight(result.data | stride, rows.dim, size) ? 1 : 0;
  return result;
}

inline PcSlots device_slots(const Indices& slots, int64_t num_blocks, int64_t block_size) {
  PcSlots result = {};
  result.slots = device_indices(slots);
  result.num_slots = num_blocks * block_size;
  result.block_size = make_divisor(block_size);
  result.block_shift = std::has_single_bit(bits_of(block_size)) ? std::countr_zero(bits_of(block_size)) : -1;
  return result;
}

inline uint64_t place_bits(pc_address data, int64_t block_stride, int64_t token_stride) {
  return data | bits_of(block_stride) | bits_of(token_stride);
}

inline PcLatentRows latent_rows(const LatentPlaneArgs& planes) {
  const BlockArray& latent = planes.latent;
  const BlockArray& rope = planes.has_rope ? planes.rope : planes.latent;
  PcLatentRows rows = {};
  rows.latent = address_of(latent.data);
  rows.block_stride = latent.block_stride;
  rows.token_stride = latent.strides[0];
  rows.rope = address_of(rope.data);
  if (!planes.has_rope) rows.rope += static_cast<pc_address>(planes.latent_dim * latent.itemsize);
  rows.rope_block_stride = rope.block_stride;
  rows.rope_token_stride = rope.strides[0];
  rows.format = static_cast<PcLatentRowFormat>(planes.format);
  if (rows.format == PC_LATENT_ROW_PLAIN) rows.type = static_cast<PcFloat>(latent.dtype);
  rows.latent_dim = clamped(planes.latent_dim);
  rows.rope_dim = clamped(planes.rope_dim);
  const uint64_t latent_bits = place_bits(rows.latent, rows.block_stride, rows.token_stride);
  const uint64_t rope_bits = place_bits(rows.rope, rows.rope_block_stride, rows.rope_token_stride);
  rows.latent_in_vectors = moves_eight(latent_bits, planes.latent_dim, latent.itemsize) ? 1 : 0;
  rows.rope_in_vectors = moves_eight(rope_bits, planes.rope_dim, latent.itemsize) ? 1 : 0;
  return rows;
}

}  // namespace internal

// Sequences of a cache of `num_blocks` blocks.
[[nodiscard]] inline PcSequenceBatch sequence_batch(const Table& table, const Indices& seq_lens, const Indices& rows,
                                                    const Indices& cu_query_lens, int64_t num_sequences,
                                                    int64_t num_blocks, int64_t block_size) {
  PcSequenceBatch batch = {};
  batch.table = device_table(table);
  batch.rows = device_indices(rows);
  batch.seq_lens = device_indices(seq_lens);
  batch.cu_query_lens = device_indices(cu_query_lens);
  batch.num_sequences = clamped(num_sequences);
  batch.num_blocks = clamped(num_blocks);
  batch.block_size = make_divisor(block_size);
  return batch;
}

// Return the launch for quantised rows; `factor` is that of e4m3 codes.
[[nodiscard]] inline LatentWriteLaunch latent_write_launch(const TokenArray& latent, const TokenArray& rope,
                                                           const LatentPlaneArgs& planes, const Indices& slots,
                                                           float factor) {
  LatentWriteLaunch launch;
  launch.params.cache = internal::latent_rows(planes);
  launch.params.latent = internal::new_rows(latent);
  launch.params.rope = internal::new_rows(rope);
  launch.params.slots = internal::device_slots(slots, planes.latent.num_blocks, planes.latent.shape[0]);
  launch.params.factor = factor;
  launch.grid = {ceil_div(slots.size, PC_LATENT_ROW_TOKENS), 1, 1};
  return launch;
}

// Return the launch that copies sequences to `out`, [token, 1, dim]. `longest` is an upper bound of their tokens.
[[nodiscard]] inline LatentGatherLaunch latent_gather_launch(const LatentPlaneArgs& planes, const Table& table,
                                                             const Indices& seq_lens, const Indices& rows,
                                                             const TokenArray& out, int64_t longest, int64_t lowest,
                                                             float factor) {
  LatentGatherLaunch launch;
  PcLatentGatherParams& params = launch.params;
  const int64_t size = planes.latent.shape[0], itemsize = size_of(out.type);
  PC_EXPECTS(seq_lens.size <= INT32_MAX, ShapeError, "seq_lens holds ", seq_lens.size, " sequences; on CUDA at most ",
             INT32_MAX, " are supported: split the call");
  params.cache = internal::latent_rows(planes);
  params.batch = sequence_batch(table, seq_lens, rows, {}, seq_lens.size, planes.latent.num_blocks, size);
  params.out = address_of(out.data);
  params.out_stride = out.token_stride / itemsize;
  params.num_tokens = out.num_tokens;
  params.factor = factor;
  params.lowest = static_cast<pc_int32>(lowest);
  const bool are_whole = planes.latent_dim % 8 == 0 && planes.rope_dim % 8 == 0;
  const uint64_t bits = params.out | bits_of(out.token_stride);
  params.out_in_vectors = are_whole && allows(bits, 8 * itemsize) ? 1 : 0;
  const int64_t blocks = std::min(ceil_div(longest, size), table.width);
  launch.grid = {seq_lens.size, 0, 1};
  if (blocks > 0 && seq_lens.size > 0) launch.grid.y = grid_rows(blocks, seq_lens.size);
  return launch;
}

}  // namespace pagecore::cuda
