// Codes of numbers and numbers of codes, a vector at a time: e4m3, e5m2, e2m1 and small integers.
//
// Codes are the low bits of 32-bit lanes. Results do not depend on the instruction set: products are hidden from the
// compiler where it could fuse them with an addition.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/vec.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));

constexpr int32_t kMagnitudeBits = 0x7fffffff;
constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kLargestBits = 0x7f7fffff;
constexpr float kLargest = 0x1.fffffep127f;
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
#elif defined(__AVX2__)
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (Vec)_mm_min_ps((__m128)a, (__m128)b);
#else
  return a < b ? a : b;
#endif
}

// a / b, correctly rounded, from the correctly rounded 1 / b (Markstein 1990): the first quotient is made faithful,
// then corrected by its exact remainder. For quotients whose remainders are normal numbers.
PC_FORCE_INLINE Vec quotient(Vec a, Vec b, [[maybe_unused]] Vec inverse) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
  const Vec first = a * inverse;
  const Vec faithful = fma(fma(-first, b, a), inverse, first);
  return fma(fma(-faithful, b, a), inverse, faithful);
#else
  return a / b;
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

// True if a lane of a mask is set.
PC_FORCE_INLINE bool any_lane(IntVec mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__x86_64__)
  return _mm_movemask_ps((__m128)mask) != 0;
#else
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= mask[i];
  return any != 0;
#endif
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

// The low word of each lane times 256, plus the high word, not negative, times kHigh.
template <int kHigh>
PC_FORCE_INLINE IntVec add_words(IntVec v) {
#if defined(__AVX512BW__)
  return (IntVec)_mm512_maskz_madd_epi16(kAllLanes, (__m512i)v, (__m512i)splat_bits(kHigh << 16 | 256));
#elif defined(__AVX2__)
  return (IntVec)_mm256_madd_epi16((__m256i)v, (__m256i)splat_bits(kHigh << 16 | 256));
#elif defined(__x86_64__)
  return (IntVec)_mm_madd_epi16((__m128i)v, (__m128i)splat_bits(kHigh << 16 | 256));
#else
  return (v & 0xffff) * 256 + (v >> 16) * kHigh;
#endif
}

// Magnitudes of numbers to those of floats with kMantissa bits and an exponent bias. Byte kSumByte of sums() is the
// code plus kOffset.
//
// A power of two is added whose last bit is that of the code, so that the sum is rounded to nearest even:
//
//   sum = 2^(e + 23 - kMantissa) + |v|    bits of the sum = its exponent | 0 ... 0 | leading 1 and mantissa of the code
//                                                           high word (7 zeros) | low word
//
// e is the exponent of v, or that of the least normal number. The leading 1 counts as 1 in the exponent of the code.
constexpr int kSumByte = 1;

template <int kMantissa, int kBias>
struct SmallFloat {
  static constexpr int32_t kLeastExponent = 127 - kBias + 1;
  static constexpr auto kOffset = static_cast<uint8_t>((kLeastExponent + 23 - kMantissa) << kMantissa);

  static constexpr auto kToAdded = static_cast<float>(1 << (23 - kMantissa));

  // 2^e
  PC_FORCE_INLINE static Vec power_of(IntVec magnitude) {
    return (Vec)max(magnitude & kInfinityBits, splat_bits(kLeastExponent << 23));
  }
  PC_FORCE_INLINE static IntVec sums(IntVec magnitude) {
    return add_words<2 << kMantissa>((IntVec)fma(power_of(magnitude), splat(kToAdded), (Vec)magnitude));
  }
  // The codes of magnitudes, and the numbers of the codes.
  PC_FORCE_INLINE static IntVec codes(IntVec magnitude, Vec& numbers) {
    const Vec power = power_of(magnitude), sum = fma(power, splat(kToAdded), (Vec)magnitude);
    numbers = fma(power, splat(-kToAdded), sum);
    return ((add_words<2 << kMantissa>((IntVec)sum) >> 8 * kSumByte) - kOffset) & 0xff;
  }
  PC_FORCE_INLINE static IntVec codes(IntVec magnitude) { return ((sums(magnitude) >> 8 * kSumByte) - kOffset) & 0xff; }
};

struct E4M3 : SmallFloat<3, 7> {
  static constexpr float kLargest = 448.0f;
};
struct E5M2 : SmallFloat<2, 15> {
  static constexpr float kLargest = 57344.0f;
};
struct E2M1 : SmallFloat<1, 1> {
  static constexpr float kLargest = 6.0f;
};

// e4m3: saturating, nearest even. NaN is 0x7f. `numbers` become the numbers of the codes.
PC_FORCE_INLINE IntVec e4m3_codes(Vec v, Vec& numbers) {
  const IntVec magnitude = (IntVec)v & kMagnitudeBits, sign = (IntVec)v & ~kMagnitudeBits;
  const IntVec nan = magnitude > kInfinityBits;
  const IntVec code = E4M3::codes(min(magnitude, bits_of(E4M3::kLargest)), numbers) | ((sign >> 24) & 0x80);
  numbers = (Vec)(nan ? (IntVec)v : (IntVec)numbers | sign);
  return nan ? splat_bits(0x7f) : code;
}
PC_FORCE_INLINE IntVec e4m3_codes(Vec v) {
  Vec numbers;
  return e4m3_codes(v, numbers);
}

// Saturating, nearest even, with the sign of another number; the codes of NaN mean nothing.
PC_FORCE_INLINE IntVec e2m1_codes(Vec v, Vec sign) {
  const IntVec inside = min((IntVec)v & kMagnitudeBits, bits_of(E2M1::kLargest));
  return E2M1::codes(inside) | (((IntVec)sign >> 28) & 8);
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

// GCC 12 widens vectors of bytes in parts.
PC_FORCE_INLINE IntVec load_codes(const char* p) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_maskz_cvtepu8_epi32(kAllLanes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (IntVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const LooseByteVec*>(p), IntVec);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
PC_FORCE_INLINE __m128i low_bytes(IntVec v) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128((__m256i)v), order);
  const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256((__m256i)v, 1), order);
  return _mm_unpacklo_epi32(low, high);
}
#endif

PC_FORCE_INLINE void store_codes(char* p, IntVec codes) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_maskz_cvtepi32_epi8(kAllLanes, (__m512i)codes));
#elif defined(__AVX2__)
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), low_bytes(codes));
#elif defined(__SSSE3__)
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const int bytes = _mm_cvtsi128_si32(_mm_shuffle_epi8((__m128i)codes, order));
  __builtin_memcpy(p, &bytes, sizeof bytes);
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
#elif defined(__SSSE3__)
  const __m128i order = _mm_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
#if defined(__AVX2__)
  const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128((__m256i)both), order);
  const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256((__m256i)both, 1), order);
  const int bytes = _mm_cvtsi128_si32(_mm_unpacklo_epi16(low, high));
#else
  const int bytes = _mm_cvtsi128_si32(_mm_shuffle_epi8((__m128i)both, order));
#endif
  __builtin_memcpy(p, &bytes, kLanes / 2);
#else
  for (int i = 0; i < kLanes / 2; ++i) p[i] = static_cast<char>(both[i]);
#endif
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
