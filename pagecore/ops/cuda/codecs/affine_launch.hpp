// Launches of quantize_affine: the division of keys and values of sealed blocks among threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cuda_src/abi/affine.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cuda/codecs/convert_launch.hpp"
#include "pagecore/ops/cuda/launch.hpp"
#include "pagecore/ops/sealed_plane.hpp"

namespace pagecore::cuda {

struct AffineLaunch {
  PcAffineParams params = {};
  Grid grid;
};

namespace internal {

// The plane of keys or values without what differs between them.
[[nodiscard]] inline PcAffinePlane affine_plane(const Cache& cache, const SealedPlane& sealed) {
  PcAffinePlane plane = {};
  plane.numbers = address_of(cache.data);
  plane.words = address_of(sealed.words);
  plane.scales = address_of(sealed.scales);
  plane.numbers_block_stride = cache.block_stride;
  plane.words_block_stride = sealed.block_stride;
  plane.scales_block_stride = sealed.scales_block_stride;
  plane.numbers_matrix_stride = cache.head_stride;
  plane.words_matrix_stride = sealed.head_stride;
  plane.scales_matrix_stride = sealed.scales_head_stride;
  plane.least_offset = sealed.least_stride;
  plane.type = static_cast<PcFloat>(cache.type);
  plane.scale_type = static_cast<PcFloat>(sealed.scale_type);
  plane.bits = static_cast<pc_int32>(sealed.bits);
  plane.group = clamped(sealed.group);
  plane.stretch = clamped(std::lcm(sealed.group, 32 / sealed.bits));
  return plane;
}

inline void set_tasks(PcAffinePlane& plane, int64_t inner, int64_t middle, const Cache& cache) {
  const int64_t most = kMaxUnits >> plane.lanes_shift;
  PC_EXPECTS(inner <= most && middle <= most / inner && cache.num_heads <= most / inner / middle, ShapeError,
             "a block has ", cache.block_size, " tokens with ", cache.num_heads, " heads of ", cache.dim,
             "; on CUDA it must have fewer than ", kMaxUnits, " numbers: use smaller blocks");
  plane.inner = make_divisor(inner);
  plane.middle = make_divisor(middle);
  plane.num_tasks = static_cast<pc_int32>(inner * middle * cache.num_heads);
}

// Return true if four adjacent channels of keys, their words and their scales can be moved at once.
[[nodiscard]] inline bool moves_quads(const PcAffinePlane& plane, int64_t size, int64_t scale_size) {
  const uint64_t numbers = plane.numbers | bits_of(plane.numbers_block_stride) | bits_of(plane.numbers_matrix_stride) |
                           bits_of(plane.entry_stride);
  const uint64_t words =
      plane.words | bits_of(plane.words_block_stride) | bits_of(plane.words_matrix_stride) | bits_of(plane.word_stride);
  const uint64_t scales = plane.scales | bits_of(plane.scales_block_stride) | bits_of(plane.scales_matrix_stride) |
                          bits_of(plane.group_stride) | bits_of(plane.least_offset);
  return allows(numbers, 4 * size) && allows(words, 16) && allows(scales, 4 * scale_size);
}

// Entries are tokens, lanes are channels, in multiples of 16.
[[nodiscard]] inline PcAffinePlane key_plane(const Cache& cache, const SealedPlane& sealed) {
  PcAffinePlane plane = affine_plane(cache, sealed);
  const int64_t size = size_of(cache.type), scale_size = size_of(sealed.scale_type);
  plane.entry_stride = cache.token_stride;
  plane.lane_stride = size;
  plane.word_stride = sealed.row_stride;
  plane.word_lane_stride = 4;
  plane.group_stride = sealed.scales_row_stride;
  plane.scale_lane_stride = scale_size;
  plane.tiling = moves_quads(plane, size, scale_size) ? PC_AFFINE_QUADS : PC_AFFINE_LANES;
  const int64_t lanes = plane.tiling == PC_AFFINE_QUADS ? cache.dim / 4 : cache.dim;
  set_tasks(plane, lanes, cache.block_size / plane.stretch, cache);
  return plane;
}

// Entries are channels, in groups of a multiple of 16; lanes are tokens.
[[nodiscard]] inline PcAffinePlane value_plane(const Cache& cache, const SealedPlane& sealed) {
  PcAffinePlane plane = affine_plane(cache, sealed);
  const int64_t size = size_of(cache.type);
  plane.entry_stride = size;
  plane.lane_stride = cache.token_stride;
  plane.word_stride = 4;
  plane.word_lane_stride = sealed.row_stride;
  plane.group_stride = sealed.group_stride;
  plane.scale_lane_stride = sealed.scales_row_stride;
  plane.tiling = PC_AFFINE_CHUNKS;
  const uint64_t numbers = plane.numbers | bits_of(plane.numbers_block_stride) | bits_of(plane.numbers_matrix_stride) |
                           bits_of(plane.lane_stride);
  plane.in_vectors = allows(numbers, 8 * size) ? 1 : 0;
  plane.lanes_shift = std::min(5, static_cast<int>(std::bit_width(bits_of(sealed.group / 8 - 1))));
  set_tasks(plane, cache.dim / sealed.group, cache.block_size, cache);
  return plane;
}

}  // namespace internal

// Launches that seal pairs of blocks; the caller has checked pairs on the host. Pairs on the device run in any order.
[[nodiscard]] inline std::vector<AffineLaunch> seal_launches(const SealArgs& args, const BlockPairs& pairs) {
  std::vector<AffineLaunch> launches;
  if (args.key.num_heads == 0) return launches;
  PC_EXPECTS(std::max({args.key.block_size, args.key.dim, args.value.dim}) < kMaxUnits, ShapeError, "blocks of ",
             args.key.block_size, " tokens have ", args.key.dim, " and ", args.value.dim,
             " channels; on CUDA each must be below ", kMaxUnits);
  ConvertBlocks blocks;
  blocks.pairs = pairs;
  blocks.num_source_blocks = std::min(args.key.num_blocks, args.value.num_blocks);
  blocks.num_target_blocks = args.num_sealed;
  AffineLaunch launch;
  launch.params.planes[0] = internal::key_plane(args.key, args.sealed_key);
  launch.params.planes[1] = internal::value_plane(args.value, args.sealed_value);
  int64_t threads = 0;
  for (const PcAffinePlane& plane : launch.params.planes) {
    threads = std::max(threads, int64_t{plane.num_tasks} << plane.lanes_shift);
  }
  internal::add_convert_launches(launches, blocks, launch, ceil_div(threads, kThreads));
  for (AffineLaunch& each : launches) each.grid.z = 2;
  return launches;
}

}  // namespace pagecore::cuda
