// Launches of quantize_affine and dequantize_affine: the division of planes among threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cuda_src/abi/affine.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/ops/affine_codes.hpp"
#include "pagecore/ops/cuda/codecs/convert_launch.hpp"
#include "pagecore/ops/cuda/launch.hpp"
#include "pagecore/ops/sealed_plane.hpp"

namespace pagecore::cuda {

struct AffineLaunch {
  PcAffineParams params = {};
  Grid grid;
};

// Blocks of the arrays of AffineCodes, whose addresses are those of block 0.
struct AffineBlocks {
  int64_t count = 1;
  int64_t numbers_stride = 0;
  int64_t words_stride = 0;
  int64_t scales_stride = 0;
};

namespace internal {

inline constexpr int64_t kAffineChunk = 8;  // entries

// A plane without the division of its tasks.
[[nodiscard]] inline PcAffinePlane affine_plane(const AffineCodes& codes, const AffineBlocks& blocks) {
  PcAffinePlane plane = {};
  plane.numbers = address_of(codes.numbers);
  plane.words = address_of(codes.words);
  plane.scales = address_of(codes.scales);
  plane.numbers_block_stride = blocks.numbers_stride;
  plane.words_block_stride = blocks.words_stride;
  plane.scales_block_stride = blocks.scales_stride;
  plane.numbers_matrix_stride = codes.numbers_matrix_stride;
  plane.words_matrix_stride = codes.words_matrix_stride;
  plane.scales_matrix_stride = codes.scales_matrix_stride;
  plane.entry_stride = codes.entry_stride;
  plane.lane_stride = codes.lane_stride;
  plane.word_stride = codes.word_stride;
  plane.word_lane_stride = codes.word_lane_stride;
  plane.group_stride = codes.group_stride;
  plane.scale_lane_stride = codes.scale_lane_stride;
  plane.least_offset = codes.least_offset;
  plane.type = static_cast<PcFloat>(codes.type);
  plane.scale_type = static_cast<PcFloat>(codes.scale_type);
  plane.bits = static_cast<pc_int32>(codes.bits);
  plane.group = clamped(codes.group);
  return plane;
}

inline void set_tasks(PcAffinePlane& plane, int64_t inner, int64_t middle, const AffineCodes& codes) {
  const int64_t most = kMaxUnits >> plane.lanes_shift;
  PC_EXPECTS(std::max(codes.num_entries, codes.num_lanes) < kMaxUnits && inner <= most &&
                 middle <= most / std::max<int64_t>(inner, 1) &&
                 codes.num_matrices <= most / std::max<int64_t>(inner * middle, 1),
             ShapeError, "a block has ", codes.num_matrices, " x ", codes.num_entries, " x ", codes.num_lanes,
             " numbers; on CUDA it must have fewer than ", kMaxUnits, ": use smaller blocks, or split the call");
  plane.inner = make_divisor(std::max<int64_t>(inner, 1));
  plane.middle = make_divisor(std::max<int64_t>(middle, 1));
  plane.num_tasks = static_cast<pc_int32>(inner * middle * codes.num_matrices);
}

// Return true if four adjacent lanes of numbers, words and scales can be moved at once.
[[nodiscard]] inline bool moves_quads(const PcAffinePlane& plane, const AffineCodes& codes) {
  const int64_t size = size_of(codes.type), scale_size = size_of(codes.scale_type);
  const bool is_adjacent =
      plane.lane_stride == size && plane.word_lane_stride == 4 && plane.scale_lane_stride == scale_size;
  const uint64_t numbers = plane.numbers | bits_of(plane.numbers_block_stride) | bits_of(plane.numbers_matrix_stride) |
                           bits_of(plane.entry_stride);
  const uint64_t words =
      plane.words | bits_of(plane.words_block_stride) | bits_of(plane.words_matrix_stride) | bits_of(plane.word_stride);
  const uint64_t scales = plane.scales | bits_of(plane.scales_block_stride) | bits_of(plane.scales_matrix_stride) |
                          bits_of(plane.group_stride) | bits_of(plane.least_offset);
  return is_adjacent && codes.num_lanes % 4 == 0 && allows(numbers, 4 * size) && allows(words, 16) &&
         allows(scales, 4 * scale_size);
}

// Return true if eight adjacent entries of a lane can be moved at once.
[[nodiscard]] inline bool moves_entries(const PcAffinePlane& plane, const AffineCodes& codes) {
  const uint64_t numbers = plane.numbers | bits_of(plane.numbers_block_stride) | bits_of(plane.numbers_matrix_stride) |
                           bits_of(plane.lane_stride);
  return plane.entry_stride == size_of(codes.type) && allows(numbers, kAffineChunk * plane.entry_stride);
}

// The tasks of quantize_affine: a group of adjacent entries, or a stretch of one lane or of four adjacent ones.
[[nodiscard]] inline PcAffinePlane quantized_plane(const AffineCodes& codes, const AffineBlocks& blocks) {
  PcAffinePlane plane = affine_plane(codes, blocks);
  if (plane.entry_stride == size_of(codes.type) && plane.word_stride == 4 && codes.group % kAffineChunk == 0) {
    plane.tiling = PC_AFFINE_CHUNKS;
    plane.in_vectors = moves_entries(plane, codes) ? 1 : 0;
    plane.lanes_shift = std::min(5, static_cast<int>(std::bit_width(bits_of(codes.group / kAffineChunk - 1))));
    set_tasks(plane, codes.num_entries / codes.group, codes.num_lanes, codes);
    return plane;
  }
  const int64_t stretch = std::lcm(codes.group, 32 / codes.bits);
  plane.stretch = clamped(stretch);
  plane.tiling = moves_quads(plane, codes) ? PC_AFFINE_QUADS : PC_AFFINE_LANES;
  const int64_t lanes = plane.tiling == PC_AFFINE_QUADS ? codes.num_lanes / 4 : codes.num_lanes;
  set_tasks(plane, lanes, codes.num_entries / stretch, codes);
  return plane;
}

// The tasks of dequantize_affine: eight consecutive entries of a lane. Adjacent tasks write adjacent numbers.
[[nodiscard]] inline PcAffinePlane restored_plane(const AffineCodes& codes, const AffineBlocks& blocks) {
  PcAffinePlane plane = affine_plane(codes, blocks);
  plane.stretch = static_cast<pc_int32>(kAffineChunk);
  plane.in_vectors = moves_entries(plane, codes) ? 1 : 0;
  const int64_t chunks = codes.num_entries / kAffineChunk;
  plane.tiling = plane.entry_stride == size_of(codes.type) ? PC_AFFINE_CHUNKS : PC_AFFINE_LANES;
  if (plane.tiling == PC_AFFINE_CHUNKS) {
    set_tasks(plane, chunks, codes.num_lanes, codes);
  } else {
    set_tasks(plane, codes.num_lanes, chunks, codes);
  }
  return plane;
}

}  // namespace internal

// Launches that seal pairs of blocks, or restore the numbers of sealed ones; the caller has checked pairs on the host.
// Pairs on the device run in any order.
[[nodiscard]] inline std::vector<AffineLaunch> seal_launches(const SealArgs& args, const BlockPairs& pairs,
                                                             bool restores) {
  const int64_t plain = std::min(args.key.num_blocks, args.value.num_blocks);
  ConvertBlocks blocks;
  blocks.pairs = pairs;
  blocks.num_source_blocks = restores ? args.num_sealed : plain;
  blocks.num_target_blocks = restores ? plain : args.num_sealed;
  const auto plane_of = [restores](const AffineCodes& codes, const Cache& cache, const SealedPlane& sealed) {
    const AffineBlocks strides = {1, cache.block_stride, sealed.block_stride, sealed.scales_block_stride};
    return restores ? internal::restored_plane(codes, strides) : internal::quantized_plane(codes, strides);
  };
  AffineLaunch launch;
  launch.params.planes[0] = plane_of(key_codes(args.key, args.sealed_key), args.key, args.sealed_key);
  launch.params.planes[1] = plane_of(value_codes(args.value, args.sealed_value), args.value, args.sealed_value);
  int64_t threads = 0;
  for (const PcAffinePlane& plane : launch.params.planes) {
    threads = std::max(threads, int64_t{plane.num_tasks} << plane.lanes_shift);
  }
  std::vector<AffineLaunch> launches;
  internal::add_convert_launches(launches, blocks, launch, ceil_div(threads, kThreads));
  for (AffineLaunch& each : launches) each.grid.z = 2;
  return launches;
}

// The launch that quantises whole arrays, or restores their numbers; none for arrays without numbers.
[[nodiscard]] inline std::vector<AffineLaunch> affine_launches(const AffineCodes& codes, const AffineBlocks& blocks,
                                                               bool restores) {
  AffineLaunch launch;
  PcAffinePlane& plane = launch.params.planes[0];
  plane = restores ? internal::restored_plane(codes, blocks) : internal::quantized_plane(codes, blocks);
  ConvertBlocks all;
  all.identity = all.num_source_blocks = all.num_target_blocks = blocks.count;
  std::vector<AffineLaunch> launches;
  if (plane.num_tasks == 0 || blocks.count == 0) return launches;
  internal::add_convert_launches(launches, all, launch,
                                 ceil_div(int64_t{plane.num_tasks} << plane.lanes_shift, kThreads));
  return launches;
}

}  // namespace pagecore::cuda
