// Vectors of float32, as wide as the instruction set allows, by GCC and Clang vector extensions.
//
// This folder is compiled once per instruction set: isa/*.cpp define PC_ISA, the name of its namespace. All code is in
// an unnamed namespace, because the linker could otherwise keep a copy that the machine cannot run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Size of a register block: query rows and value vectors that fit in the registers next to four keys.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBlockRows = 4;
#else
constexpr int kBlockRows = 2;
#endif
constexpr int kBlockTokens = 4;
constexpr int kBlockVectors = 4;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef float Vec4 __attribute__((vector_size(16)));

// Unaligned, aliasing variants.
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
typedef uint16_t LooseHalfVec __attribute__((vector_size(2 * kLanes), aligned(1), may_alias));
typedef uint8_t LooseByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef float LooseVec4 __attribute__((vector_size(16), aligned(1), may_alias));

// Calls f.template operator()<0>() ... <kCount - 1>(), for numbers that instructions encode.
template <int kCount, typename F>
PC_FORCE_INLINE void for_each_constant(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>)
      __attribute__((always_inline)) { (f.template operator()<I>(), ...); }(std::make_integer_sequence<int, kCount>{});
}

PC_FORCE_INLINE Vec splat(float x) { return x - Vec{}; }
PC_FORCE_INLINE Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
PC_FORCE_INLINE void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
PC_FORCE_INLINE Vec4 load_four(const float* p) { return *reinterpret_cast<const LooseVec4*>(p); }
PC_FORCE_INLINE void store_four(float* p, Vec4 v) { *reinterpret_cast<LooseVec4*>(p) = v; }

// A number that several instructions use: GCC would load it for each of them, and Zen 3 loads fewer vectors of 32 bytes
// than it multiplies.
template <typename V>
PC_FORCE_INLINE V in_register(V v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("" : "+x"(v));
#endif
  return v;
}

#if defined(__AVX512F__)
// GCC 12 warns that intrinsics without a mask use an undefined vector.
constexpr __mmask16 kAllLanes = 0xffff;
#endif

// a if a > b, else b (also for NaN). GCC compiles the comparison to two instructions.
PC_FORCE_INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_max_ps(kAllLanes, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (Vec)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

// a * b + c, rounded once if the machine has FMA. Explicit, because the compiler could fuse differently in different
// instances, and a row's bits must not depend on that.
PC_FORCE_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

PC_FORCE_INLINE float fma(float a, float b, float c) { return fma(splat(a), splat(b), splat(c))[0]; }

// Reduces a vector to four lanes: lane i of the result is the sum (or maximum) of lanes i, i + 4, i + 8 ...
#if defined(__AVX512F__)
typedef float Vec8 __attribute__((vector_size(32)));
PC_FORCE_INLINE Vec8 low(Vec v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
PC_FORCE_INLINE Vec8 high(Vec v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
PC_FORCE_INLINE Vec4 low(Vec8 v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
PC_FORCE_INLINE Vec4 high(Vec8 v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }
PC_FORCE_INLINE Vec4 sum_to_four(Vec v) {
  const Vec8 half = low(v) + high(v);
  return low(half) + high(half);
}
PC_FORCE_INLINE Vec4 max_to_four(Vec v) {
  const Vec8 a = low(v), b = high(v);
  const Vec8 half = a > b ? a : b;
  const Vec4 c = low(half), d = high(half);
  return c > d ? c : d;
}
#elif defined(__AVX2__)
PC_FORCE_INLINE Vec4 low(Vec v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
PC_FORCE_INLINE Vec4 high(Vec v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }
PC_FORCE_INLINE Vec4 sum_to_four(Vec v) { return low(v) + high(v); }
PC_FORCE_INLINE Vec4 max_to_four(Vec v) {
  const Vec4 a = low(v), b = high(v);
  return a > b ? a : b;
}
#else
PC_FORCE_INLINE Vec4 sum_to_four(Vec v) { return v; }
PC_FORCE_INLINE Vec4 max_to_four(Vec v) { return v; }
#endif

PC_FORCE_INLINE float sum(Vec v) {
  Vec4 x = sum_to_four(v);
  x = x + __builtin_shufflevector(x, x, 2, 3, 0, 1);
  x = x + __builtin_shufflevector(x, x, 1, 0, 3, 2);
  return x[0];
}

PC_FORCE_INLINE float max_lane(Vec v) {
  Vec4 x = max_to_four(v);
  Vec4 y = __builtin_shufflevector(x, x, 2, 3, 0, 1);
  x = x > y ? x : y;
  y = __builtin_shufflevector(x, x, 1, 0, 3, 2);
  x = x > y ? x : y;
  return x[0];
}

// {sum(a), sum(b), sum(c), sum(d)}, each in the order of sum().
PC_FORCE_INLINE Vec4 sum_each(Vec a, Vec b, Vec c, Vec d) {
  const Vec4 p = sum_to_four(a), q = sum_to_four(b), r = sum_to_four(c), s = sum_to_four(d);
  // {p0 + p2, p1 + p3, q0 + q2, q1 + q3}, and likewise for r and s
  const Vec4 pq = __builtin_shufflevector(p, q, 0, 1, 4, 5) + __builtin_shufflevector(p, q, 2, 3, 6, 7);
  const Vec4 rs = __builtin_shufflevector(r, s, 0, 1, 4, 5) + __builtin_shufflevector(r, s, 2, 3, 6, 7);
  return __builtin_shufflevector(pq, rs, 0, 2, 4, 6) + __builtin_shufflevector(pq, rs, 1, 3, 5, 7);
}

#if defined(__AVX512F__)
struct Add {
  PC_FORCE_INLINE static Vec of(Vec a, Vec b) { return a + b; }
};
struct Max {
  PC_FORCE_INLINE static Vec of(Vec a, Vec b) { return max(a, b); }
};

// Each step joins halves of two vectors with one shuffle and blends, which have a higher throughput. Intrinsics,
// because GCC turns blends into shuffles.
PC_FORCE_INLINE Vec blend(Vec a, Vec b, __mmask16 from_b) {
  return (Vec)_mm512_mask_blend_ps(from_b, (__m512)a, (__m512)b);
}
template <typename Join>
PC_FORCE_INLINE Vec join_eights(Vec a, Vec b) {  // {a0 + a8 ... a7 + a15, b0 + b8 ...}
  return Join::of(blend(a, b, 0xff00),
                  __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23));
}
template <typename Join>
PC_FORCE_INLINE Vec join_fours(Vec a, Vec b) {  // {a0 + a4 .., b0 + b4 .., a8 + a12 .., b8 + b12 ..}
  const Vec others = blend(a, b, 0x0f0f);
  return Join::of(blend(a, b, 0xf0f0),
                  __builtin_shufflevector(others, others, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
}
template <typename Join>
PC_FORCE_INLINE Vec join_twos(Vec a, Vec b) {  // in each four: {a0 + a2, a1 + a3, b0 + b2, b1 + b3}
  return Join::of(blend(a, b, 0xcccc),
                  __builtin_shufflevector(a, b, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29));
}
template <typename Join>
PC_FORCE_INLINE Vec join_ones(Vec a, Vec b) {  // in each four: {a0 + a1, b0 + b1, a2 + a3, b2 + b3}
  const Vec others = blend(a, b, 0x5555);
  return Join::of(blend(a, b, 0xaaaa),
                  __builtin_shufflevector(others, others, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
}

// The joined lanes of each of 16 vectors, in the order of sum().
template <typename Join>
PC_FORCE_INLINE Vec join_lanes(const Vec (&of)[kLanes]) {
  Vec fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    fours[i] = join_fours<Join>(join_eights<Join>(of[i], of[8 + i]), join_eights<Join>(of[4 + i], of[12 + i]));
  }
  return join_ones<Join>(join_twos<Join>(fours[0], fours[2]), join_twos<Join>(fours[1], fours[3]));
}
#endif

// out[row] = sum_each(sums[row]...) for kBlockRows rows at once: a transposition through the additions, in the same
// order.
#if defined(__AVX512F__)
PC_FORCE_INLINE void sum_block(const Vec (&sums)[kBlockRows][kBlockTokens], float* out, int64_t stride) {
  Vec t[kBlockTokens];  // four partial sums for each of rows 0, 2, 1, 3
#pragma GCC unroll 4
  for (int i = 0; i < kBlockTokens; ++i) {
    t[i] = join_fours<Add>(join_eights<Add>(sums[0][i], sums[1][i]), join_eights<Add>(sums[2][i], sums[3][i]));
  }
  const Vec rows = join_ones<Add>(join_twos<Add>(t[0], t[2]), join_twos<Add>(t[1], t[3]));
  store_four(out, low(low(rows)));
  _mm_storeu_ps(out + 2 * stride, _mm512_maskz_extractf32x4_ps(0xf, (__m512)rows, 1));
  _mm_storeu_ps(out + stride, _mm512_maskz_extractf32x4_ps(0xf, (__m512)rows, 2));
  _mm_storeu_ps(out + 3 * stride, _mm512_maskz_extractf32x4_ps(0xf, (__m512)rows, 3));
}
#elif defined(__AVX2__)
PC_FORCE_INLINE Vec pair_halves(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
PC_FORCE_INLINE void sum_block(const Vec (&sums)[kBlockRows][kBlockTokens], float* out, int64_t stride) {
  Vec t[kBlockTokens];
#pragma GCC unroll 4
  for (int i = 0; i < kBlockTokens; ++i) t[i] = pair_halves(sums[0][i], sums[1][i]);
  const Vec pq = __builtin_shufflevector(t[0], t[1], 0, 1, 8, 9, 4, 5, 12, 13) +
                 __builtin_shufflevector(t[0], t[1], 2, 3, 10, 11, 6, 7, 14, 15);
  const Vec rs = __builtin_shufflevector(t[2], t[3], 0, 1, 8, 9, 4, 5, 12, 13) +
                 __builtin_shufflevector(t[2], t[3], 2, 3, 10, 11, 6, 7, 14, 15);
  const Vec rows = __builtin_shufflevector(pq, rs, 0, 2, 8, 10, 4, 6, 12, 14) +
                   __builtin_shufflevector(pq, rs, 1, 3, 9, 11, 5, 7, 13, 15);
  store_four(out, low(rows));
  store_four(out + stride, high(rows));
}
#else
PC_FORCE_INLINE void sum_block(const Vec (&sums)[kBlockRows][kBlockTokens], float* out, int64_t stride) {
#pragma GCC unroll 4
  for (int r = 0; r < kBlockRows; ++r) {
    store_four(out + r * stride, sum_each(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
  }
}
#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
