// Transpose of a square of kLanes vectors, on raw bits.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/vec.hpp"

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

#if defined(__AVX512F__)
// Four lanes at each of four addresses.
PC_FORCE_INLINE Vec load_quarters(const float* a, const float* b, const float* c, const float* d) {
  __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(a));
  v = _mm512_maskz_insertf32x4(kAllLanes, v, _mm_loadu_ps(b), 1);
  v = _mm512_maskz_insertf32x4(kAllLanes, v, _mm_loadu_ps(c), 2);
  return (Vec)_mm512_maskz_insertf32x4(kAllLanes, v, _mm_loadu_ps(d), 3);
}
// Four lanes at `from`, and at 1, 2 and 3 strides from there.
PC_FORCE_INLINE Vec load_quarters(const float* from, int64_t stride) {
  return load_quarters(from, from + stride, from + 2 * stride, from + 3 * stride);
}
#endif

// Transposes the 4 x 4 squares in each quarter of four rows.
PC_FORCE_INLINE void transpose_squares(Vec* m) {
  const Vec a = zip_low(m[0], m[2]), b = zip_low(m[1], m[3]);
  const Vec c = zip_high(m[0], m[2]), d = zip_high(m[1], m[3]);
  m[0] = zip_low(a, b);
  m[1] = zip_high(a, b);
  m[2] = zip_low(c, d);
  m[3] = zip_high(c, d);
}

// Transposes the 4 x 4 squares in each quarter of four rows, then the quarters among the rows.
PC_FORCE_INLINE void transpose(Vec (&m)[kLanes]) {
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) transpose_squares(m + i);
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

#if defined(__AVX2__)
// Loads the dwords of kLanes rows from byte `at` on, kLanes or 8 of each, and transposes them.
PC_FORCE_INLINE void load_square(const char* const* rows, int64_t at, [[maybe_unused]] int dwords,
                                 Vec (&square)[kLanes]) {
#if defined(__AVX512F__)
  const auto part = static_cast<__mmask16>(dwords == kLanes ? 0xffff : 0xff);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) square[i] = (Vec)_mm512_maskz_loadu_epi32(part, rows[i] + at);
#else
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) square[i] = load(reinterpret_cast<const float*>(rows[i] + at));
#endif
  transpose(square);
}
#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
