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

namespace pagecore::cpu {

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

// Codes and scales of all numbers, and back.
void quantize_affine(const AffineCodes& codes, int64_t num_threads) noexcept;
void dequantize_affine(const AffineCodes& codes, int64_t num_threads) noexcept;

}  // namespace pagecore::cpu
