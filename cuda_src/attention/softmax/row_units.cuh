// Weights times the scales of values, as halves.
//
// Such a product is the contribution of a key to a row. It can be any float32. As a half it is relative to the unit of
// its row, a power of two for which the largest contribution to the row so far is at least 2^14 and below 2^15. O of
// the row is relative to the unit, too. Keys that a row does not attend to do not change its unit.
//
//   larger score          the softmax shrinks O and all contributions so far: the unit can become smaller
//   larger contribution   the unit becomes larger, and O relative to it smaller
#pragma once

#include "cuda_src/attention/softmax/scores.cuh"

namespace pagecore {

// The units of the two rows of a lane. The 4 lanes of a row have the same unit.
class RowUnits {
 public:
  PC_MEMBER void clear() { largest_[0] = largest_[1] = 0.0f; }

  // Makes contributions relative to the units. `rescale` are the factors of the softmax by which the caller multiplies
  // O; they become those that also make O relative to the new units.
  template <int Tiles>
  PC_MEMBER void apply(float (&s)[Tiles][4], float (&rescale)[2]) {
    PC_UNROLL
    for (int r = 0; r < 2; ++r) {
      float largest = 0.0f;
      PC_UNROLL
      for (int t = 0; t < Tiles; ++t) {
        PC_UNROLL
        for (int i = 2 * r; i < 2 * r + 2; ++i) largest = pc_max(largest, pc_max(s[t][i], -s[t][i]));
      }
      largest = pc_max(largest, pc_shuffle_xor(largest, 1));
      largest = pc_max(largest, pc_shuffle_xor(largest, 2));
      const float before = unit(r);
      largest_[r] = pc_max(largest_[r] * rescale[r], largest);  // fault: unit_after_a_larger_score
      const float inverse = pc_bits_to_float((254u << 23) - pc_float_to_bits(unit(r)));
      PC_UNROLL
      for (int t = 0; t < Tiles; ++t) {
        PC_UNROLL
        for (int i = 2 * r; i < 2 * r + 2; ++i) s[t][i] *= inverse;
      }
      // In this order: before * inverse can exceed float32.
      rescale[r] = rescale[r] * before * inverse;  // fault: unit_of_sums
    }
  }

  // The unit of row r, 0 or 1, of the lane. It and its inverse are normal numbers.
  PC_MEMBER float unit(int r) const {
    const pc_uint32 power = pc_float_to_bits(largest_[r]) & 0x7f800000u;
    return pc_bits_to_float((power < 15u << 23 ? 15u << 23 : power) - (14u << 23));
  }

 private:
  float largest_[2];  // contribution so far, relative to the largest score of the row, as O is
};

// The units of rows whose contributions are bfloat16: that type has the range of float32.
struct NoUnits {
  PC_MEMBER void clear() {}
  template <typename Scores>
  PC_MEMBER void apply(Scores& /*s*/, float (& /*rescale*/)[2]) {}
  PC_MEMBER float unit(int /*r*/) const { return 1.0f; }
};

template <typename T>
struct UnitsOf {
  using Type = NoUnits;
};
template <>
struct UnitsOf<pc_half> {
  using Type = RowUnits;
};

}  // namespace pagecore
