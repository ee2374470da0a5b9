// Codes of numbers and numbers of codes, a vector at a time: e4m3, e5m2, e2m1 and small integers.
//
// Codes are the low bits of 32-bit lanes. Results do not depend on the instruction set: products are hidden from the
// compiler where it could fuse them with an addition.
#pragma once

#include "pagecore/ops/cpu/kernels/vec.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));

constexpr int32_t kMagnitudeBits = 0x7fffffff;
constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kLargestBits = 0x7f7fffff;
// 0.5 - 2^-25: added to a number before it is truncated, it rounds halves away from 0, and nothing below a half.
constexpr float kAlmostHalf = 0x1.fffffep-2f;

PC_FORCE_INLINE IntVec splat_bits(int32_t x) { return x - IntVec{}; }
PC_FORCE_INLINE IntVec bits_of(float x) { return (IntVec)splat(x); }
PC_FORCE_INLINE IntVec select(IntVec mask, IntVec a, IntVec b) { return (a & mask) | (b & ~mask); }

PC_FORCE_INLINE IntVec max(IntVec a, IntVec b) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_maskz_max_epi32(kAllLanes, (__m512i)a, (__m512i)b);
#else
  return a > b ? a : b;
#endif
}

PC_FORCE_INLINE IntVec min(IntVec a, IntVec b) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_maskz_min_epi32(kAllLanes, (__m512i)a, (__m512i)b);
#else
  return a < b ? a : b;
#endif
}

// a if a < b, else b (also for NaN).
PC_FORCE_INLINE Vec min(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_min_ps(kAllLanes, (__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

// The number that was computed, rounded: it is not fused with an addition.
PC_FORCE_INLINE Vec rounded(Vec v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

// The largest lane in all lanes.
template <typename T>
PC_FORCE_INLINE T max_of_lanes(T v) {
#if defined(__AVX512F__)
  v = max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif defined(__AVX2__)
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  return max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#else
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  return max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
#endif
}

// ---- codes of numbers

// A float of 8 bits: saturating, nearest even; NaN is 0x7f.
template <int kMantissa, int32_t kBias>
PC_FORCE_INLINE IntVec float8_codes(Vec v, float largest) {
  constexpr int kShift = 23 - kMantissa;
  constexpr int32_t kRebias = (127 - kBias) << kMantissa;
  constexpr float kLeastNormal = 1.0f / static_cast<float>(1 << (kBias - 1));
  // Added to a subnormal, its last bit becomes the last bit of a float32.
  constexpr float kAlign = static_cast<float>(1 << 23) / static_cast<float>(1 << (kBias - 1 + kMantissa));
  const IntVec bits = (IntVec)v, magnitude = bits & kMagnitudeBits;
  const IntVec m = min(magnitude, bits_of(largest));
  const IntVec normal = ((m + ((1 << (kShift - 1)) - 1) + ((m >> kShift) & 1)) >> kShift) - kRebias;
  const IntVec subnormal = (IntVec)((Vec)m + kAlign) - bits_of(kAlign);
  const IntVec code = (m < bits_of(kLeastNormal) ? subnormal : normal) | ((bits >> 24) & 0x80);
  return magnitude > kInfinityBits ? splat_bits(0x7f) : code;
}

PC_FORCE_INLINE IntVec e4m3_codes(Vec v) { return float8_codes<3, 7>(v, 448.0f); }
PC_FORCE_INLINE IntVec e5m2_codes(Vec v) { return float8_codes<2, 15>(v, 57344.0f); }

// Saturating, nearest even; the codes of NaN mean nothing.
PC_FORCE_INLINE IntVec e2m1_codes(Vec v) {
  const IntVec bits = (IntVec)v;
  const IntVec m = min(bits & kMagnitudeBits, bits_of(6.0f));
  const IntVec normal = ((m + 0x1fffff + ((m >> 22) & 1)) >> 22) - (126 << 1);
  const IntVec subnormal = (IntVec)((Vec)m + 0x1p22f) - bits_of(0x1p22f);
  return (m < bits_of(1.0f) ? subnormal : normal) | ((bits >> 28) & 8);
}

// Saturating, halves up; no sign. The codes of NaN mean nothing.
PC_FORCE_INLINE IntVec e2m1_magnitudes_up(Vec v) {
  const IntVec m = min((IntVec)v & kMagnitudeBits, bits_of(6.0f));
  const IntVec normal = ((m + 0x200000) >> 22) - (126 << 1);
  const IntVec subnormal = -(IntVec)(m >= bits_of(0.25f)) - (IntVec)(m >= bits_of(0.75f));
  return m < bits_of(1.0f) ? subnormal : normal;
}

// The nearest integers of [low, high], halves away from 0; those of NaN mean nothing.
PC_FORCE_INLINE IntVec integer_codes(Vec v, float low, float high) {
  const Vec inside = min(max(v, splat(low)), splat(high));
  const IntVec half = bits_of(kAlmostHalf) | ((IntVec)inside & ~kMagnitudeBits);
  return __builtin_convertvector(inside + (Vec)half, IntVec);
}

// ---- numbers of codes

PC_FORCE_INLINE Vec number_of_e4m3(IntVec code) {
  const IntVec m = code & 0x7f;
  const Vec subnormal = __builtin_convertvector(m, Vec) * 0x1p-9f;
  const IntVec normal = (m << 20) + (120 << 23);
  const IntVec number = m < 8 ? (IntVec)subnormal : normal;
  return (Vec)((m == 0x7f ? splat_bits(0x7fc00000) : number) | ((code & 0x80) << 24));
}

PC_FORCE_INLINE Vec number_of_e5m2(IntVec code) {
  const IntVec m = code & 0x7f;
  const Vec subnormal = __builtin_convertvector(m, Vec) * 0x1p-16f;
  const IntVec normal = (m << 21) + (112 << 23);
  const IntVec special = m == 0x7c ? splat_bits(kInfinityBits) : splat_bits(0x7fc00000);
  const IntVec number = m < 4 ? (IntVec)subnormal : normal;
  return (Vec)((m >= 0x7c ? special : number) | ((code & 0x80) << 24));
}

PC_FORCE_INLINE Vec number_of_e2m1(IntVec code) {
  const IntVec m = code & 7;
  const IntVec subnormal = (m == 1) & bits_of(0.5f);
  const IntVec normal = (m << 22) + (126 << 23);
  return (Vec)((m < 2 ? subnormal : normal) | ((code & 8) << 28));
}

// 2^(code - 127); NaN for 255.
PC_FORCE_INLINE float number_of_ue8m0(uint8_t code) {
  const uint32_t bits = code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23;
  float number;
  __builtin_memcpy(&number, &bits, sizeof number);
  return number;
}

// ---- bytes

PC_FORCE_INLINE IntVec load_codes(const char* p) {
  return __builtin_convertvector(*reinterpret_cast<const LooseByteVec*>(p), IntVec);
}

PC_FORCE_INLINE void store_codes(char* p, IntVec codes) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_maskz_cvtepi32_epi8(kAllLanes, (__m512i)codes));
#else
  *reinterpret_cast<LooseByteVec*>(p) = __builtin_convertvector(codes, ByteVec);
#endif
}

// Two codes of 4 bits in a byte, the even one in the low nibble: kLanes / 2 bytes.
PC_FORCE_INLINE IntVec load_nibbles(const char* p) {
  alignas(64) uint8_t codes[kLanes];
  for (int i = 0; i < kLanes / 2; ++i) {
    const auto both = static_cast<uint8_t>(p[i]);
    codes[2 * i] = both & 15;
    codes[2 * i + 1] = both >> 4;
  }
  return load_codes(reinterpret_cast<const char*>(codes));
}

PC_FORCE_INLINE void store_nibbles(char* p, IntVec codes) {
  typedef uint64_t WideVec __attribute__((vector_size(4 * kLanes)));
  const WideVec both = (WideVec)codes | (WideVec)codes >> 28;
#if defined(__AVX512F__)
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_maskz_cvtepi64_epi8(0xff, (__m512i)both));
#else
#pragma GCC unroll 4
  for (int i = 0; i < kLanes / 2; ++i) p[i] = static_cast<char>(both[i]);
#endif
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
