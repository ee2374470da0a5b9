// Rows of numbers to codes and scales, in the formats with a scale for a group: one function for each dtype.
#pragma once

#include "pagecore/ops/cpu/kernels/quantize_rows.hpp"

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

// The largest magnitude of a group in each lane modulo its position; of the numbers that are not NaN if kKnown.
template <Float From, int kGroup, bool kKnown>
PC_FORCE_INLINE IntVec group_magnitude(const char* source) {
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
// The largest magnitudes of the groups in 128 numbers of bfloat16, as bits of float32.
template <int kGroup>
PC_FORCE_INLINE IntVec magnitudes_of_pairs(const char* source) {
  const auto larger = [](IntVec a, IntVec b) __attribute__((always_inline)) {
    return (IntVec)_mm512_maskz_max_epu16(~__mmask32{0}, (__m512i)a, (__m512i)b);
  };
  const auto words = [&](int i) __attribute__((always_inline)) {
    return (IntVec)load_as_float<Float::F32>(source + i * 4 * kLanes) & 0x7fff7fff;
  };
  // Of 16 words of a quarter, then of 4, then of 2: those of vectors a, b, c, d are in the dwords of a quarter.
  const auto fold = [&](IntVec a, IntVec b) __attribute__((always_inline)) {
    return larger(__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                  __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  };
  const IntVec ab = fold(words(0), words(1)), cd = fold(words(2), words(3));
  IntVec v = larger(__builtin_shufflevector(ab, cd, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30),
                    __builtin_shufflevector(ab, cd, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31));
  v = max((IntVec)((BitVec)v << 16), (IntVec)((BitVec)v & 0xffff0000));
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  if constexpr (kGroup == 16)
    return __builtin_shufflevector(v, v, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  return max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// The largest magnitudes of `count` groups, at most kLanes, one a lane; the other lanes mean nothing.
template <Float From, int kGroup, bool kKnown>
PC_FORCE_INLINE IntVec group_magnitudes(const char* source, int64_t count) {
  const auto of_group = [&](int64_t i) __attribute__((always_inline)) {
    return group_magnitude<From, kGroup, kKnown>(source + i * kGroup * kSize<From>);
  };
#if defined(__AVX512BW__)
  if (From == Float::BF16 && count == 128 / kGroup) {
    const IntVec most = magnitudes_of_pairs<kGroup>(source);
    if (!kKnown || !any_lane(most > kInfinityBits)) return most;
  }
#endif
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
  alignas(64) int32_t most[kLanes] = {};
  for (int64_t g = 0; g < count; ++g) most[g] = max_of_lanes(of_group(g))[0];
  return *reinterpret_cast<const IntVec*>(most);
#endif
}

// The biased exponent of the least power of two that is at least amax / largest. `above` is 2^23 less the mantissa bits
// of `largest`, and `exponent` its exponent; the result is at least `floor`.
PC_FORCE_INLINE IntVec ceil_exponent(IntVec amax, int32_t above, int32_t exponent, int32_t floor) {
  return max(((min(amax, splat_bits(kLargestBits)) + (above - 1)) >> 23) - exponent, splat_bits(floor));
}

// 2^(127 - exponent)
PC_FORCE_INLINE Vec inverse_power(IntVec exponent) { return (Vec)((254 - exponent) << 23); }

// Groups whose scales are computed before their codes, so that many divisions and reductions overlap.
constexpr int64_t kGroupBatch = 256;

// Two numbers for each group of a batch.
struct GroupNumbers {
  alignas(64) float factors[kGroupBatch + kLanes];
  alignas(64) float inverses[kGroupBatch + kLanes];
};

// Stores code(vector, factor, inverse) for each vector of `groups` groups, the first of which has the index `first`.
// Codes of a byte are e4m3, of numbers times factors.
template <Float From, int kGroup, int kCodesPerByte, typename Code>
PC_FORCE_INLINE void store_groups(const char* source, int64_t groups, char* codes, const GroupNumbers& numbers,
                                  int64_t first, Code&& code) {
  const auto code_of = [&](int64_t i) __attribute__((always_inline)) {
    const int64_t group = first + i / kParts<kGroup>;
    return code(load_as_float<From>(source + i * kLanes * kSize<From>), splat(numbers.factors[group]),
                splat(numbers.inverses[group]));
  };
  if constexpr (requires { code.store(source, groups, codes, numbers.factors, numbers.inverses); }) {
    const float *divisors = numbers.factors + first, *inverses = numbers.inverses + first;
    if (groups % 4 == 0 && code.store(source, groups, codes, divisors, inverses)) [[likely]]
      return;
  }
  const int64_t vectors = groups * kParts<kGroup>;
  int64_t i = 0;
  for (; i + 4 <= vectors; i += 4) {
#if defined(__AVX512VBMI__)
    if constexpr (kCodesPerByte == 1 && From == Float::BF16) {
      const char* from = source + i * kLanes * kSize<From>;
      if (are_finite_pairs(from)) [[likely]] {
        const float* factors = numbers.factors + first + i / kParts<kGroup>;
        store_e4m3_of_pairs(from, codes + i * kLanes, splat(factors[0]), splat(factors[1]));
        continue;
      }
    }
#endif
    const IntVec four[4] = {code_of(i), code_of(i + 1), code_of(i + 2), code_of(i + 3)};
    if constexpr (kCodesPerByte == 2) store_four_nibbles(codes + i * kLanes / 2, four);
    if constexpr (kCodesPerByte == 1) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) store_codes(codes + (i + j) * kLanes, four[j]);
    }
  }
  for (; i < vectors; ++i) {
    if constexpr (kCodesPerByte == 1) store_codes(codes + i * kLanes, code_of(i));
    if constexpr (kCodesPerByte == 2) store_nibbles(codes + i * kLanes / 2, code_of(i));
  }
}

// Copies the bytes of scales; those of a row of some hundred numbers without a call.
PC_FORCE_INLINE void copy_scales(char* to, const char* from, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) __builtin_memcpy(to + i, from + i, 8);
  for (; i < count; ++i) to[i] = from[i];
}

// For each batch of groups computes the largest magnitudes, of the numbers that are not NaN if kKnown; then, a vector
// of groups at a time, scale_of(magnitudes, bytes, factor), which returns the bytes of the scales and a factor for
// each; then stores code(vector, factor, 1 / factor) of each vector of a group.
template <Float From, int kGroup, int kCodesPerByte, bool kKnown, typename ScaleOf, typename Code>
PC_FORCE_INLINE void for_each_group(const RowBatch& given, ScaleOf&& scale_of, Code&& code) {
  const RowBatch batch = given;  // stores of codes cannot change the copy
  constexpr int64_t kSource = kGroup * kSize<From>, kCodes = kGroup / kCodesPerByte;
  const int64_t groups = batch.dim / kGroup;
  const int64_t rows = groups < kGroupBatch ? kGroupBatch / groups : 1;
  GroupNumbers numbers;
  alignas(64) int32_t magnitudes[kGroupBatch + kLanes];
  alignas(64) char bytes[kGroupBatch + kLanes];
  for (int64_t first = 0; first < batch.count; first += rows) {
    const int64_t last = first + rows < batch.count ? first + rows : batch.count;
    for (int64_t begin = 0; begin < groups; begin += kGroupBatch) {
      const int64_t width = (begin + kGroupBatch < groups ? begin + kGroupBatch : groups) - begin;
      int64_t total = 0;
      for (int64_t row = first; row < last; ++row) {
        const char* source = source_of(batch, row) + begin * kSource;
        for (int64_t g = 0; g < width; g += kLanes) {
          const int64_t count = width - g < kLanes ? width - g : kLanes;
          store(reinterpret_cast<float*>(magnitudes + total),
                (Vec)group_magnitudes<From, kGroup, kKnown>(source + g * kSource, count));
          total += count;
        }
      }
      for (int64_t i = 0; i < total; i += kLanes) {
        IntVec scales;
        Vec factor;
        scale_of((IntVec)load(reinterpret_cast<const float*>(magnitudes + i)), scales, factor);
        store_codes(bytes + i, scales);
        store(numbers.factors + i, factor);
        store(numbers.inverses + i, splat(1.0f) / factor);
      }
      int64_t used = 0;
      for (int64_t row = first; row < last; ++row, used += width) {
        copy_scales(scales_of(batch, row) + begin, bytes + used, width);
        store_groups<From, kGroup, kCodesPerByte>(source_of(batch, row) + begin * kSource, width,
                                                  codes_of(batch, row) + begin * kCodes, numbers, used, code);
      }
    }
  }
}

template <Float From>
void quantize_fp4_block16(const RowBatch& batch) {
  const auto scale_of = [](IntVec amax, IntVec& bytes, Vec& inverse) __attribute__((always_inline)) {
    const IntVec known = amax <= kInfinityBits;
    const IntVec exponent = ceil_exponent(amax, 0x400000, 2, 94);  // 6 is 1.5 * 2^2
    bytes = select(known, exponent, splat_bits(255));
    inverse = (Vec)((IntVec)inverse_power(exponent) & known);  // 0 for NaN
  };
  const auto code = [](Vec v, Vec inverse, Vec) __attribute__((always_inline)) {
    const IntVec sign = (IntVec)(v < 0.0f) & 8;
    return (e2m1_magnitudes_up(v * inverse) | sign) & (inverse > 0.0f);
  };
  for_each_group<From, 16, 2, false>(batch, scale_of, code);
}

template <Float From>
void quantize_mxfp8(const RowBatch& batch) {
  const auto scale_of = [](IntVec amax, IntVec& bytes, Vec& inverse) __attribute__((always_inline)) {
    bytes = ceil_exponent(amax, 0x200000, 8, 19);  // 448 is 1.75 * 2^8
    inverse = inverse_power(bytes);
  };
  const auto code = [](Vec v, Vec inverse, Vec) __attribute__((always_inline)) { return e4m3_codes(v * inverse); };
  for_each_group<From, 32, 1, true>(batch, scale_of, code);
}

// The scales of groups whose largest numbers become `most`, e4m3; NaN for a group with NaN.
PC_FORCE_INLINE IntVec nv_scales(IntVec amax, Vec most) {
  return e4m3_codes((Vec)select(amax <= kInfinityBits, min(amax, splat_bits(kLargestBits)), amax) / most);
}

// The codes of a group and a divisor; 0 if the divisor is 0 or NaN.
PC_FORCE_INLINE void nv_codes(const Vec (&group)[kParts<16>], Vec divisor, IntVec (&codes)[kParts<16>]) {
  const IntVec used = divisor > 0.0f;
#pragma GCC unroll 8
  for (int i = 0; i < kParts<16>; ++i) codes[i] = e2m1_codes(group[i] / divisor, group[i]) & used;
}

// The codes of numbers by a divisor, and by its inverse with two corrections.
struct NvDivides {
  PC_FORCE_INLINE IntVec operator()(Vec v, Vec divisor, Vec) const {
    return e2m1_codes(v / divisor, v) & (divisor > 0.0f);
  }
};
struct NvCorrects {
  PC_FORCE_INLINE IntVec operator()(Vec v, Vec divisor, Vec inverse) const {
    return e2m1_codes(quotient(v, divisor, inverse), v) & (divisor > 0.0f);
  }
};

#if defined(__AVX512VBMI__)
// The same for bfloat16 and divisors with four leading bits. A quotient n / m of 8 by 4 bits is a tie of codes or
// differs from each tie by 2^-10 or more, so that the product with the inverse, rounded to a multiple of 2^-13, is on
// the same side of each.
struct NvOfPairs : NvCorrects {
  // False if a divisor is 0 or NaN; nothing is stored then. `groups` is a multiple of 4.
  PC_FORCE_INLINE bool store(const char* source, int64_t groups, char* codes, const float* divisors,
                             const float* inverses) const {
    // The inverses of the groups 0 and 1 in the halves of a vector, and of the groups 2 and 3.
    const auto first = (BitVec)_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), second = first + 2;
    static constexpr ByteTable64 kLowBytes = table_64([](int i) { return i % 32 / 16 * 64 + i % 16 * 4; });
    for (int64_t g = 0; g < groups; g += 4) {
      if (_mm_movemask_ps(_mm_cmp_ps(_mm_loadu_ps(divisors + g), _mm_setzero_ps(), _CMP_GT_OQ)) != 15) return false;
    }
    for (int64_t g = 0; g < groups; g += 4, source += 2 * kLine, codes += kLine / 2) {
      const Vec four = (Vec)_mm512_maskz_broadcast_f32x4(kAllLanes, _mm_loadu_ps(inverses + g)) * 0x1p13f;
      const BitVec low = codes_of(source, (Vec)_mm512_maskz_permutevar_ps(kAllLanes, (__m512)four, (__m512i)first));
      const BitVec high =
          codes_of(source + kLine, (Vec)_mm512_maskz_permutevar_ps(kAllLanes, (__m512)four, (__m512i)second));
      const auto bytes = (Bytes)_mm512_maskz_permutex2var_epi8(~__mmask64{0}, (__m512i)low,
                                                               _mm512_load_si512(kLowBytes.bytes), (__m512i)high);
      __builtin_memcpy(codes, &bytes, kLine / 2);
    }
    return true;
  }

 private:
  // The codes of 32 numbers times factors, two in the lowest byte of each lane.
  PC_FORCE_INLINE static BitVec codes_of(const char* source, Vec factors) {
    static constexpr ByteTable64 kTable =
        table_64([](int i) { return (i > 2) + (i >= 6) + (i > 10) + (i >= 14) + (i > 20) + (i >= 28) + (i > 40); });
    const auto words = (BitVec)_mm512_loadu_si512(source);
    const auto inside = [&](BitVec bits) __attribute__((always_inline)) {
      const auto number = _mm512_maskz_cvtps_epu32(kAllLanes, (__m512)((Vec)bits * factors));
      return (BitVec)_mm512_maskz_min_epu32(kAllLanes, number, (__m512i)(BitVec{} + (6 << 13)));
    };
    const BitVec even = inside(words << 16 & 0x7fffffff), odd = inside(words & 0x7fff0000);
    const auto numbers = (Words)(even | odd << 16);
    // The sum of the quarters rounded down and up is odd between two of them.
    const Words quarters = (numbers >> 11) + ((numbers + 2047) >> 11);
    const auto codes =
        (BitVec)_mm512_maskz_permutexvar_epi8(~__mmask64{0}, (__m512i)quarters, _mm512_load_si512(kTable.bytes));
    const BitVec both = codes | ((BitVec)((Words)words >> 12) & 0x00080008);
    return both | both >> 12;
  }
};
#endif

template <Float From>
void quantize_nvfp4(const RowBatch& batch) {
  const Vec factors = splat(batch.factor), six = splat(6.0f) * factors;
  const auto scale_of = [=](IntVec amax, IntVec& bytes, Vec& divisor) __attribute__((always_inline)) {
    bytes = nv_scales(amax, six);
    divisor = number_of_e4m3(bytes) * factors;
  };
  const bool is_usual = batch.factor >= 0x1p-60f && batch.factor <= 0x1p60f;
#if defined(__AVX512VBMI__)
  if constexpr (From == Float::BF16) {
    const bool is_power = (bits_of(batch.factor)[0] & 0x7fffff) == 0;
    if (is_usual && is_power) return for_each_group<From, 16, 2, false>(batch, scale_of, NvOfPairs{});
  }
#endif
  if (is_usual) {
    for_each_group<From, 16, 2, false>(batch, scale_of, NvCorrects{});
  } else {
    for_each_group<From, 16, 2, false>(batch, scale_of, NvDivides{});
  }
}

// The codes of a group with one scale, and their squared error. `scale` is in all lanes.
PC_FORCE_INLINE float nv_choice(const Vec (&group)[kParts<16>], IntVec scale, Vec factor, IntVec (&codes)[kParts<16>]) {
  const Vec number = number_of_e4m3(scale);
  nv_codes(group, number * factor, codes);
  Vec squares[kParts<16>];
#pragma GCC unroll 8
  for (int i = 0; i < kParts<16>; ++i) {
    const Vec error = group[i] - rounded(rounded(number_of_e2m1(codes[i]) * number) * factor);
    squares[i] = rounded(error * error);
  }
  // In the order of sum(), for vectors of any length.
  for (int half = kParts<16> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) squares[i] += squares[i + half];
  }
  return sum(squares[0]);
}

template <Float From>
void quantize_nvfp4_4over6(const RowBatch& batch) {
  const Vec factors = splat(batch.factor);
  const auto quantize_group = [=](const char* source, char* codes, char* scale) __attribute__((always_inline)) {
    Vec group[kParts<16>];
    IntVec six[kParts<16>], four[kParts<16>];
    load_group<From, 16>(source, group);
    const IntVec amax = max_of_lanes(group_magnitude<From, 16, false>(source));
    const IntVec of_six = nv_scales(amax, splat(6.0f) * factors), of_four = nv_scales(amax, splat(4.0f) * factors);
    const float error = nv_choice(group, of_six, factors, six);
    const bool is_four = nv_choice(group, of_four, factors, four) < error;
#pragma GCC unroll 8
    for (int i = 0; i < kParts<16>; ++i) store_nibbles(codes + i * kLanes / 2, is_four ? four[i] : six[i]);
    *scale = static_cast<char>(is_four ? of_four[0] : of_six[0]);
  };
  for (int64_t row = 0; row < batch.count; ++row) {
    for (int64_t g = 0; g < batch.dim / 16; ++g) {
      quantize_group(source_of(batch, row) + g * 16 * kSize<From>, codes_of(batch, row) + g * 8,
                     scales_of(batch, row) + g);
    }
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
