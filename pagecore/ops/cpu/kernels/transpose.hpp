// Transpose of a square of kLanes vectors, on raw bits.
#pragma once

#include <utility>

#include "pagecore/ops/cpu/kernels/vec.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

using Lanes = std::make_integer_sequence<int, kLanes>;

// In each quarter of four lanes: {a0, b0, a1, b1} (low) or {a2, b2, a3, b3} (high).
template <int kFrom, int... I>
PC_FORCE_INLINE Vec zip(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & ~3) + kFrom + (I & 3) / 2 + (I & 1) * kLanes)...);
}
PC_FORCE_INLINE Vec zip_low(Vec a, Vec b) { return zip<0>(a, b, Lanes{}); }
PC_FORCE_INLINE Vec zip_high(Vec a, Vec b) { return zip<2>(a, b, Lanes{}); }

// The even or odd quarters of a, then those of b.
template <int kFrom, int... I>
PC_FORCE_INLINE Vec quarters(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / 4 * 8 + kFrom * 4 + I % 4)...);
}
PC_FORCE_INLINE Vec even_quarters(Vec a, Vec b) { return quarters<0>(a, b, Lanes{}); }
PC_FORCE_INLINE Vec odd_quarters(Vec a, Vec b) { return quarters<1>(a, b, Lanes{}); }

// Transposes the 4 x 4 squares in each quarter of four rows, then the quarters among the rows.
PC_FORCE_INLINE void transpose(Vec (&m)[kLanes]) {
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    const Vec a = zip_low(m[i], m[i + 2]), b = zip_low(m[i + 1], m[i + 3]);
    const Vec c = zip_high(m[i], m[i + 2]), d = zip_high(m[i + 1], m[i + 3]);
    m[i] = zip_low(a, b);
    m[i + 1] = zip_high(a, b);
    m[i + 2] = zip_low(c, d);
    m[i + 3] = zip_high(c, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if constexpr (kLanes == 16) {
      const Vec a = even_quarters(m[i], m[4 + i]), b = even_quarters(m[8 + i], m[12 + i]);
      const Vec c = odd_quarters(m[i], m[4 + i]), d = odd_quarters(m[8 + i], m[12 + i]);
      m[i] = even_quarters(a, b);
      m[4 + i] = even_quarters(c, d);
      m[8 + i] = odd_quarters(a, b);
      m[12 + i] = odd_quarters(c, d);
    } else if constexpr (kLanes == 8) {
      const Vec a = m[i], b = m[4 + i];
      m[i] = even_quarters(a, b);
      m[4 + i] = odd_quarters(a, b);
    }
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
