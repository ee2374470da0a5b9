// The largest magnitudes of groups of numbers, as bits of float32.
#pragma once

#include "pagecore/ops/cpu/kernels/rows/quantize_rows.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Vectors of a group.
template <int kGroup>
constexpr int kParts = kGroup / kLanes;

template <Float From, int kGroup>
PC_FORCE_INLINE void load_group(const char* source, Vec (&group)[kParts<kGroup>]) {
#pragma GCC unroll 8
  for (int i = 0; i < kParts<kGroup>; ++i) group[i] = load_as_float<From>(source + i * kLanes * kSize<From>);
}

// The largest magnitudes of numbers of a group, one a lane; of the numbers that are not NaN if kKnown.
template <Float From, int kGroup, bool kKnown>
PC_FORCE_INLINE IntVec group_magnitude(const char* source) {
  if constexpr (kIsWord<From> && !kKnown && kGroup >= kWordLanes) {
    Words most{};
    for_each_words(source, kGroup,
                   [&](Words words) __attribute__((always_inline)) { most = max(most, words & 0x7fff); });
    return larger_of_pairs<From>(most);
  }
  Vec group[kParts<kGroup>];
  load_group<From, kGroup>(source, group);
  IntVec most{};
#pragma GCC unroll 8
  for (int i = 0; i < kParts<kGroup>; ++i) most = max(most, kKnown ? known_bits(group[i]) : magnitude_bits(group[i]));
  return most;
}

// The largest lane of each of four vectors, four times each.
#if defined(__AVX512F__)
PC_FORCE_INLINE IntVec max_of_four(IntVec a, IntVec b, IntVec c, IntVec d) {
  const IntVec ab = max(__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                        __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  const IntVec cd = max(__builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                        __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  IntVec v = max(__builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                 __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
}
#endif

#if defined(__AVX512BW__)
// The largest magnitudes of the groups in 128 numbers of 16 bits, as bits of float32.
template <Float From, int kGroup>
PC_FORCE_INLINE IntVec magnitudes_of_pairs(const char* source) {
  const auto larger = [](IntVec a, IntVec b) __attribute__((always_inline)) {
    return (IntVec)_mm512_maskz_max_epu16(~__mmask32{0}, (__m512i)a, (__m512i)b);
  };
  const auto words = [&](int i) __attribute__((always_inline)) {
    return (IntVec)load_as_float<Float::F32>(source + i * 4 * kLanes) & 0x7fff7fff;
  };
  // Of 16 words of a quarter, then of 4, then of 2: those of vectors a, b, c, d are in the dwords of a quarter. A blend
  // costs less than a shuffle.
  const auto fold = [&](IntVec a, IntVec b) __attribute__((always_inline)) {
    return larger((IntVec)blend((Vec)a, (Vec)b, 0xcccc),
                  (IntVec)_mm512_maskz_shuffle_ps(kAllLanes, (__m512)a, (__m512)b, 0b01'00'11'10));
  };
  const auto ab = (__m512)fold(words(0), words(1)), cd = (__m512)fold(words(2), words(3));
  IntVec v = larger((IntVec)_mm512_maskz_shuffle_ps(kAllLanes, ab, cd, 0b10'00'10'00),
                    (IntVec)_mm512_maskz_shuffle_ps(kAllLanes, ab, cd, 0b11'01'11'01));
  v = max((IntVec)((BitVec)v & 0xffff), (IntVec)((BitVec)v >> 16));
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  if constexpr (kGroup == 16)
    return float_bits<From>(__builtin_shufflevector(v, v, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  return float_bits<From>(max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)));
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// The largest magnitudes of up to 128 / kGroup groups of numbers of 16 bits, as bits of float32; the other lanes mean
// nothing.
template <Float From, int kGroup>
PC_FORCE_INLINE IntVec magnitudes_of_pairs(const char* source, int64_t count) {
  const int64_t last = count * kGroup / kWordLanes - 1;
  // In each half of a vector of two vectors: the larger of two words of a, of two words of b, and so on.
  const auto pair = [=](int64_t i) __attribute__((always_inline)) {
    const auto words = [=](int64_t v) __attribute__((always_inline)) {
      return (__m256i)(load_words(source + (v < last ? v : last) * kByteLanes) & 0x7fff);
    };
    const __m256i a = words(i), b = words(i + 1);
    return (__m256i)max((Words)_mm256_unpacklo_epi16(a, b), (Words)_mm256_unpackhi_epi16(a, b));
  };
  const auto four = [=](int64_t i) __attribute__((always_inline)) {
    const __m256i ab = pair(i), cd = pair(i + 2);
    return (__m256i)max((Words)_mm256_unpacklo_epi32(ab, cd), (Words)_mm256_unpackhi_epi32(ab, cd));
  };
  const __m256i low = four(0), high = four(4);
  const auto halves = (__m256i)max((Words)_mm256_unpacklo_epi64(low, high), (Words)_mm256_unpackhi_epi64(low, high));
  const __m128i most = _mm_max_epu16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  if constexpr (kGroup == 16) {
    if constexpr (From == Float::F16) return (IntVec)_mm256_cvtph_ps(most);
    return (IntVec)_mm256_cvtepu16_epi32(most) << 16;
  }
  const __m128i larger = _mm_slli_epi32(_mm_max_epu16(most, _mm_srli_epi32(most, 16)), 16);
  if constexpr (From == Float::F16) {
    return (IntVec)_mm256_cvtph_ps(_mm_packus_epi32(_mm_srli_epi32(larger, 16), _mm_setzero_si128()));
  }
  return (IntVec)_mm256_zextsi128_si256(larger);
}
#endif

#if !defined(__AVX512F__)
// The largest lane of each of kLanes vectors.
PC_FORCE_INLINE IntVec max_of_each(const IntVec (&v)[kLanes]) {
#if defined(__AVX2__)
  const auto pair = [](IntVec a, IntVec b) __attribute__((always_inline)) {
    return max(__builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13),
               __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15));
  };
  const auto four = [=](IntVec ab, IntVec cd) __attribute__((always_inline)) {
    return max(__builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13),
               __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15));
  };
  const IntVec low = four(pair(v[0], v[1]), pair(v[2], v[3])), high = four(pair(v[4], v[5]), pair(v[6], v[7]));
  return max(__builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11),
             __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15));
#else
  const auto pair = [](IntVec a, IntVec b) __attribute__((always_inline)) {
    return max(__builtin_shufflevector(a, b, 0, 4, 1, 5), __builtin_shufflevector(a, b, 2, 6, 3, 7));
  };
  const IntVec ab = pair(v[0], v[1]), cd = pair(v[2], v[3]);
  return max(__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
#endif
}
#endif

// The largest magnitudes of `count` groups, at most kLanes, one a lane; the other lanes mean nothing.
template <Float From, int kGroup, bool kKnown>
PC_FORCE_INLINE IntVec magnitudes_of_groups(const char* source, int64_t count) {
  const auto of_group = [&](int64_t i) __attribute__((always_inline)) {
    return group_magnitude<From, kGroup, kKnown>(source + i * kGroup * kSize<From>);
  };
#if defined(__AVX512F__)  // in registers: a load that spans several stores would wait for them
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  IntVec most{};
  int64_t g = 0;
  for (; g + 4 <= count; g += 4) {
    const IntVec four = max_of_four(of_group(g), of_group(g + 1), of_group(g + 2), of_group(g + 3));
    const auto lanes = static_cast<__mmask16>(0xf << g);
    most = (IntVec)_mm512_mask_permutexvar_epi32((__m512i)most, lanes, firsts, (__m512i)four);
  }
  for (; g < count; ++g) {
    most = (IntVec)_mm512_mask_mov_epi32((__m512i)most, static_cast<__mmask16>(1 << g),
                                         (__m512i)max_of_lanes(of_group(g)));
  }
  return most;
#else
  IntVec each[kLanes];
#pragma GCC unroll 8
  for (int64_t g = 0; g < kLanes; ++g) each[g] = of_group(g < count ? g : count - 1);
  return max_of_each(each);
#endif
}

// The largest magnitudes of all numbers of `count` groups, at most kMagnitudes, one a lane.
template <Float From, int kGroup>
constexpr int64_t kMagnitudes = kIsWord<From> && 128 / kGroup < kLanes ? 128 / kGroup : kLanes;

template <Float From, int kGroup>
PC_FORCE_INLINE IntVec group_magnitudes(const char* source, int64_t count) {
#if defined(__AVX512BW__)
  if constexpr (kIsWord<From>) {
    if (count == 128 / kGroup) return magnitudes_of_pairs<From, kGroup>(source);
  }
#elif defined(__AVX2__)
  if constexpr (kIsWord<From>) return magnitudes_of_pairs<From, kGroup>(source, count);
#endif
  return magnitudes_of_groups<From, kGroup, false>(source, count);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
