// Codes of 2 or 4 bits with a scale and a least number for each group: number = least + code * scale (KIVI).
//
//   numbers  [matrix, entry, lane]        a group is `group` consecutive entries of a lane
//   words    [matrix, word, lane]         int32; 16 or 8 consecutive entries of a lane, the first in the lowest bits
//   scales   [matrix, group, lane]        the least number is `least_offset` bytes after the scale
//
// Entries are tokens and lanes are channels for keys; for values, entries are channels and lanes are tokens.
//
//   least = min(group), scale = (max(group) - least) / (2 ** bits - 1), both rounded to the dtype of the scales
//   code  = (number - least) / scale, to nearest even, within 0 to 2 ** bits - 1; 0 if the scale is 0
//
// Infinities count as the largest number of the scales' dtype, and a range beyond the largest float32 as that number.
// A group with NaN has the scale NaN, the least number 0 and codes 0.
#pragma once

#include <cstdint>

#include "pagecore/ops/args.hpp"
#include "pagecore/ops/sealed_plane.hpp"

namespace pagecore {

// Strides count bytes.
struct AffineCodes {
  char* numbers = nullptr;
  char* words = nullptr;
  char* scales = nullptr;
  Float type = Float::F32;  // of the numbers
  Float scale_type = Float::F32;
  int64_t bits = 2;
  int64_t num_matrices = 0;
  int64_t num_entries = 0;  // a multiple of `group` and of the codes of a word
  int64_t num_lanes = 0;
  int64_t group = 1;
  int64_t numbers_matrix_stride = 0;
  int64_t entry_stride = 0;
  int64_t lane_stride = 0;
  int64_t words_matrix_stride = 0;
  int64_t word_stride = 0;
  int64_t word_lane_stride = 0;
  int64_t scales_matrix_stride = 0;
  int64_t group_stride = 0;
  int64_t scale_lane_stride = 0;
  int64_t least_offset = 0;
};

namespace internal {

// Block 0 of keys or values, without what differs between them. Matrices are heads.
[[nodiscard]] inline AffineCodes block_codes(const Cache& cache, const SealedPlane& plane) {
  AffineCodes codes;
  codes.numbers = cache.data;
  codes.words = plane.words;
  codes.scales = plane.scales;
  codes.type = cache.type;
  codes.scale_type = plane.scale_type;
  codes.bits = plane.bits;
  codes.group = plane.group;
  codes.num_matrices = cache.num_heads;
  codes.numbers_matrix_stride = cache.head_stride;
  codes.words_matrix_stride = plane.head_stride;
  codes.scales_matrix_stride = plane.scales_head_stride;
  codes.least_offset = plane.least_stride;
  return codes;
}

}  // namespace internal

// The keys of block 0 of a cache, and of a plane of sealed blocks.
[[nodiscard]] inline AffineCodes key_codes(const Cache& cache, const SealedPlane& plane) {
  AffineCodes codes = internal::block_codes(cache, plane);
  codes.num_entries = cache.block_size;
  codes.num_lanes = cache.dim;
  codes.entry_stride = cache.token_stride;
  codes.lane_stride = size_of(cache.type);
  codes.word_stride = plane.row_stride;
  codes.word_lane_stride = 4;
  codes.group_stride = plane.scales_row_stride;
  codes.scale_lane_stride = size_of(plane.scale_type);
  return codes;
}

// The same for values.
[[nodiscard]] inline AffineCodes value_codes(const Cache& cache, const SealedPlane& plane) {
  AffineCodes codes = internal::block_codes(cache, plane);
  codes.num_entries = cache.dim;
  codes.num_lanes = cache.block_size;
  codes.entry_stride = size_of(cache.type);
  codes.lane_stride = cache.token_stride;
  codes.word_stride = 4;
  codes.word_lane_stride = plane.row_stride;
  codes.group_stride = plane.group_stride;
  codes.scale_lane_stride = plane.scales_row_stride;
  return codes;
}

}  // namespace pagecore
