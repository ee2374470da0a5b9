// int8 checkpoints of recurrent states: a code for each number, and a scale for each key of a matrix.
//
//   state  [V, K]    codes [V, K] int8       scales [K], in the dtype of the state
//
//   scale[k] = |largest state[:, k]| / 127, rounded to the dtype; code = state / scale, to nearest even
//
// A key that is all zero has scale 0 and codes 0. A key with an infinity or NaN reads back as NaN.
#pragma once

#include <cstdint>

#include "pagecore/ops/args.hpp"

namespace pagecore::cpu {

// A plane of states [slot, matrix, V, K], and its codes and scales in other slots. Slots are C-contiguous.
struct StatePlane {
  char* state = nullptr;
  int8_t* codes = nullptr;
  char* scales = nullptr;
  Float type = Float::F32;   // of state and scales: F32 or BF16
  int64_t num_matrices = 0;  // of a slot
  int64_t num_values = 0;
  int64_t num_keys = 0;
  int64_t state_stride = 0;  // bytes between slots
  int64_t codes_stride = 0;
  int64_t scales_stride = 0;
};

// Slot pairs[2 * i] of the state and slot pairs[2 * i + 1] of the codes, for i < count. No slot that is written occurs
// twice. The caller has checked the slots.
void quantize_states(const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) noexcept;
void dequantize_states(const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) noexcept;

}  // namespace pagecore::cpu
