// exp and tanh of float32 vectors, accurate to about 1.5 ulp. The polynomials are minimax fits.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/vec.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

#if !defined(__AVX512F__)

// e^r for |r| <= ln 2 / 2.
PC_FORCE_INLINE Vec exp_near_zero(Vec r) {
  Vec p = splat(1.3950632620e-03f);
  p = fma(p, r, splat(8.3689720107e-03f));
  p = fma(p, r, splat(4.1666203681e-02f));
  p = fma(p, r, splat(1.6666518152e-01f));
  p = fma(p, r, splat(5.0000000958e-01f));
  return fma(p, r * r, r) + 1.0f;
}

#else

// 2^r for |r| <= 1/2.
PC_FORCE_INLINE Vec exp2_near_zero(Vec r) {
  Vec p = splat(1.3264727313e-03f);
  p = fma(p, r, splat(9.6715129912e-03f));
  p = fma(p, r, splat(5.5507335812e-02f));
  p = fma(p, r, splat(2.4022242427e-01f));
  p = fma(p, r, splat(6.9314700365e-01f));
  return fma(p, r, splat(1.0f));
}

#endif

// For x <= 88. Exactly 1 at 0; exactly 0 below -86, including -inf; NaN for NaN.
PC_FORCE_INLINE Vec exp(Vec x) {
  const Vec lowest = splat(-86.0f);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: the sum of a number and it is a whole number
#if defined(__AVX512F__)
  // x / ln 2 = n + r; 1 / ln 2 in two parts.
  const Vec per_ln2 = splat(1.44269502f);
  const Vec n = fma(x, per_ln2, magic) - magic;
  const Vec r = fma(x, splat(1.925963e-08f), fma(x, per_ln2, -n));
  const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)lowest, _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(counts, (__m512)exp2_near_zero(r), (__m512)n);
#else
  // n = round(x / ln 2) is in the low bits of the sum.
  const Vec bounded = max(lowest, x);  // x if it is NaN
  const Vec shifted = fma(bounded, splat(1.44269504f), magic);
  const Vec n = shifted - magic;
  // ln 2 in two parts, the first with few bits, so that r is exact.
  Vec r = fma(n, splat(-0.693359375f), bounded);
  r = fma(n, splat(2.12194440e-4f), r);
  const Vec p = exp_near_zero(r);
  const Vec two_to_n = (Vec)(((IntVec)shifted << 23) + 0x3f800000);
  return (Vec)((IntVec)(p * two_to_n) & ~(IntVec)(x < lowest));
#endif
}

PC_FORCE_INLINE float exp1(float x) { return exp(splat(x))[0]; }

// Relatively accurate near 0 too.
PC_FORCE_INLINE Vec tanh(Vec x) {
  const BitVec sign = (BitVec)x & 0x80000000;
  const Vec magnitude = (Vec)((BitVec)x ^ sign);
  const Vec a = magnitude > 9.5f ? splat(9.5f) : magnitude;  // 1 in float32 from there on
  const Vec z = a * a;
  Vec p = splat(-5.7170038588e-03f);
  p = fma(p, z, splat(2.0650552135e-02f));
  p = fma(p, z, splat(-5.3743487867e-02f));
  p = fma(p, z, splat(1.3331491172e-01f));
  p = fma(p, z, splat(-3.3333283921e-01f));
  const Vec near = fma(a * z, p, a);
  const Vec far = 1.0f - 2.0f / (exp(a + a) + 1.0f);
  return (Vec)((BitVec)(a < 0.625f ? near : far) | sign);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
