// int8 checkpoints of recurrent states: a code for each number, and a scale for each key of a matrix.
//
//   state  [V, K]    codes [V, K] int8       scales [K], in the dtype of the state
//
//   scale[k] = |largest state[:, k]| / 127, rounded to the dtype; code = state / scale, to nearest even
//
// A key that is all zero has scale 0 and codes 0. A key with an infinity or NaN reads back as NaN.
#pragma once

#include <cstdint>

#include "pagecore/ops/state_plane.hpp"

namespace pagecore::cpu {

// Slot pairs[2 * i] of the state and slot pairs[2 * i + 1] of the codes, for i < count. No slot that is written occurs
// twice. The caller has checked the slots.
void quantize_states(const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) noexcept;
void dequantize_states(const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) noexcept;

}  // namespace pagecore::cpu
