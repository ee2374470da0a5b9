// Rows of numbers to codes and scales, in the formats with a scale for a group: one function for each dtype.
#pragma once

#include "pagecore/ops/cpu/kernels/rows/group_magnitudes.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The biased exponent of the least power of two that is at least amax / largest. `above` is 2^23 less the mantissa bits
// of `largest`, and `exponent` its exponent; the result is at least `floor`.
PC_FORCE_INLINE IntVec ceil_exponent(IntVec amax, int32_t above, int32_t exponent, int32_t floor) {
  return max(((min(amax, splat_bits(kLargestBits)) + (above - 1)) >> 23) - exponent, splat_bits(floor));
}

// 2^(127 - exponent)
PC_FORCE_INLINE Vec inverse_power(IntVec exponent) { return (Vec)((254 - exponent) << 23); }

// Groups whose scales are computed before their codes, so that many divisions and reductions overlap.
constexpr int64_t kGroupBatch = 256;

// The numbers of the groups of a batch.
struct GroupNumbers {
  alignas(64) int32_t magnitudes[kGroupBatch + kLanes];
  alignas(64) float factors[kGroupBatch + kLanes];
  alignas(64) float inverses[kGroupBatch + kLanes];
  alignas(64) char scales[kGroupBatch + kLanes];
};

// The rows [first, last) of a batch, and in each the groups [begin, begin + width).
struct GroupRange {
  int64_t first;
  int64_t last;
  int64_t begin;
  int64_t width;
};

// Copies an integer of type T; its value is hidden from GCC, which would replace a loop of copies by a slower call.
template <typename T>
PC_FORCE_INLINE void copy_integer(char* to, const char* from) {
  T bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  asm("" : "+r"(bytes));
  __builtin_memcpy(to, &bytes, sizeof bytes);
}

// Copies the bytes of the scales of a row.
PC_FORCE_INLINE void copy_scales(char* to, const char* from, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) copy_integer<uint64_t>(to + i, from + i);
  if (i + 4 <= count) copy_integer<uint32_t>(to + i, from + i), i += 4;
  for (; i < count; ++i) copy_integer<uint8_t>(to + i, from + i);
}

// Clears the codes of groups whose factor is 0 or NaN.
template <int64_t kCodes>
void clear_unused(char* codes, const float* factors, int64_t groups) {
  for (int64_t g = 0; g < groups; ++g) {
    if (!(factors[g] > 0.0f)) __builtin_memset(codes + g * kCodes, 0, kCodes);
  }
}

// Lists the largest magnitudes of groups, of the numbers that are not NaN if kKnown, and returns their number. With
// kKnown, `is_finite` becomes false if a number is not finite; it means nothing otherwise.
template <Float From, int kGroup, bool kKnown>
PC_FORCE_INLINE int64_t list_magnitudes(const RowBatch& batch, const GroupRange& range, int32_t* magnitudes,
                                        bool& is_finite) {
  constexpr int64_t kMost = kMagnitudes<From, kGroup>, kSource = kGroup * kSize<From>;
  int64_t total = 0;
  IntVec special{};
  for (int64_t row = range.first; row < range.last; ++row) {
    const char* source = source_of(batch, row) + range.begin * kSource;
    fetch_next_source(batch, row, range.width * kSource);
    for (int64_t g = 0; g < range.width; g += kMost) {
      const int64_t count = range.width - g < kMost ? range.width - g : kMost;
      IntVec most = group_magnitudes<From, kGroup>(source + g * kSource, count);
      if constexpr (kKnown) {
        special |= most > kLargestBits;
        if (any_lane(most > kInfinityBits)) [[unlikely]]
          most = magnitudes_of_groups<From, kGroup, true>(source + g * kSource, count);
      }
      store(reinterpret_cast<float*>(magnitudes + total), (Vec)most);
      total += count;
    }
  }
  is_finite = !any_lane(special);
  return total;
}

// Stores the codes and scales of groups; see for_each_group().
template <Float From, int kGroup, int kCodesPerByte, typename CodesOfQuad>
PC_FORCE_INLINE void store_groups(const RowBatch& batch, const GroupRange& range, const GroupNumbers& numbers,
                                  bool any_unused, CodesOfQuad&& codes_of_quad) {
  constexpr int64_t kSource = kGroup * kSize<From>, kCodes = kGroup / kCodesPerByte;
  const float *factors = numbers.factors, *inverses = numbers.inverses;
  const char* scales = numbers.scales;
  for (int64_t row = range.first; row < range.last; ++row) {
    char* const codes = codes_of(batch, row) + range.begin * kCodes;
    fetch_next_target(batch, row, range.width * kCodes);
    copy_scales(scales_of(batch, row) + range.begin, scales, range.width);
    store_quads<From, kCodesPerByte>(source_of(batch, row) + range.begin * kSource, range.width * kGroup, codes,
                                     [&](const char* from, int64_t d) __attribute__((always_inline)) {
                                       return codes_of_quad(from, factors + d / kGroup, inverses + d / kGroup);
                                     });
    if (any_unused) [[unlikely]]
      clear_unused<kCodes>(codes, factors, range.width);
    factors += range.width, inverses += range.width, scales += range.width;
  }
}

// For each batch of groups lists the largest magnitudes, of the numbers that are not NaN if kKnown; then, a vector of
// groups at a time, calls scale_of(magnitudes, scales, factor), which returns the bytes of the scales and a factor for
// each; then stores the codes, which codes_of(is_finite) returns as a function of a quad, the factors and their
// inverses. Codes of a group whose factor is 0 or NaN are 0.
template <Float From, int kGroup, int kCodesPerByte, bool kKnown, typename ScaleOf, typename CodesOf>
PC_FORCE_INLINE void for_each_group(const RowBatch& given, ScaleOf&& scale_of, CodesOf&& codes_of) {
  const RowBatch batch = given;  // stores of codes cannot change the copy
  const int64_t groups = batch.dim / kGroup;
  const int64_t rows = groups < kGroupBatch ? kGroupBatch / groups : 1;
  GroupNumbers numbers;
  for (int64_t first = 0; first < batch.count; first += rows) {
    const int64_t last = first + rows < batch.count ? first + rows : batch.count;
    for (int64_t begin = 0; begin < groups; begin += kGroupBatch) {
      const GroupRange range{first, last, begin, groups - begin < kGroupBatch ? groups - begin : kGroupBatch};
      bool is_finite;
      const int64_t total = list_magnitudes<From, kGroup, kKnown>(batch, range, numbers.magnitudes, is_finite);
      IntVec unused{};
      for (int64_t i = 0; i < total; i += kLanes) {
        IntVec scales;
        Vec factor;
        scale_of((IntVec)load(reinterpret_cast<const float*>(numbers.magnitudes + i)), scales, factor);
        unused |= ~(factor > 0.0f);
        store_codes(numbers.scales + i, scales);
        store(numbers.factors + i, factor);
        store(numbers.inverses + i, splat(1.0f) / factor);
      }
      const auto store_all = [&](auto finite) __attribute__((always_inline)) {
        store_groups<From, kGroup, kCodesPerByte>(batch, range, numbers, any_lane(unused), codes_of(finite));
      };
      if (!kKnown || is_finite) {
        store_all(std::true_type{});
      } else {
        store_all(std::false_type{});
      }
    }
  }
}

template <Float From>
void quantize_fp4_block16(const RowBatch& batch) {
  const auto scale_of = [](IntVec amax, IntVec& bytes, Vec& four) __attribute__((always_inline)) {
    const IntVec known = amax <= kInfinityBits;
    const IntVec exponent = ceil_exponent(amax, 0x400000, 2, 94);  // 6 is 1.5 * 2^2
    bytes = select(known, exponent, splat_bits(255));
    four = (Vec)((IntVec)inverse_power(exponent - 2) & known);  // 4 / scale; 0 for NaN
  };
  const auto codes = [](const char* from, const float* fours, const float*) __attribute__((always_inline)) {
    return e2m1_quad_up<From>(
        from, [=](Vec v, int i) __attribute__((always_inline)) { return v * quad_factor<From, 16>(fours, i); });
  };
  for_each_group<From, 16, 2, false>(batch, scale_of, [=](auto) { return codes; });
}

template <Float From>
void quantize_mxfp8(const RowBatch& batch) {
  const auto scale_of = [](IntVec amax, IntVec& bytes, Vec& inverse) __attribute__((always_inline)) {
    bytes = ceil_exponent(amax, 0x200000, 8, 19);  // 448 is 1.75 * 2^8
    inverse = inverse_power(bytes);
  };
  const auto codes_of = [](auto finite) {
    return [](const char* from, const float* inverses, const float*) __attribute__((always_inline)) {
      return float8_quad<E4M3, From, decltype(finite)::value>(
          from, [=](Vec v, int i) __attribute__((always_inline)) { return v * quad_factor<From, 32>(inverses, i); });
    };
  };
  for_each_group<From, 32, 1, true>(batch, scale_of, codes_of);
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

// Ways of dividing numbers by the divisors of their groups.
enum class NvQuotient {
  Divided,
  Corrected,  // the product with the inverse, corrected: the same numbers
  // The product with the inverse, by e2m1_quad_of_pairs(), for bfloat16 and divisors with four leading bits: a quotient
  // of 8 by 4 bits is a tie of codes, or differs from each tie by 2^-10 or more.
  OfPairs,
};

template <Float From, NvQuotient kQuotient, typename ScaleOf>
PC_FORCE_INLINE void quantize_nvfp4_by(const RowBatch& batch, ScaleOf&& scale_of) {
  const auto codes = [](const char* from, const float* divisors, const float* inverses) __attribute__((always_inline)) {
    const auto inverse = [=](int i) __attribute__((always_inline)) { return quad_factor<From, 16>(inverses, i); };
    if constexpr (kQuotient == NvQuotient::OfPairs) {
      return e2m1_quad_of_pairs(from, inverse);
    } else {
      return e2m1_quad_even<From>(from, [=](Vec v, int i) __attribute__((always_inline)) {
        const Vec divisor = quad_factor<From, 16>(divisors, i);
        return kQuotient == NvQuotient::Divided ? v / divisor : quotient(v, divisor, inverse(i));
      });
    }
  };
  for_each_group<From, 16, 2, false>(batch, scale_of, [=](auto) { return codes; });
}

template <Float From>
void quantize_nvfp4(const RowBatch& batch) {
  const Vec factors = splat(batch.factor), six = splat(6.0f) * factors;
  const auto scale_of = [=](IntVec amax, IntVec& bytes, Vec& divisor) __attribute__((always_inline)) {
    bytes = nv_scales(amax, six);
    divisor = number_of_e4m3(bytes) * factors;
  };
  const bool is_usual = batch.factor >= 0x1p-60f && batch.factor <= 0x1p60f;
  const bool is_power = (bits_of(batch.factor)[0] & 0x7fffff) == 0;
  if constexpr (From == Float::BF16) {
    if (is_usual && is_power) return quantize_nvfp4_by<From, NvQuotient::OfPairs>(batch, scale_of);
  }
  if (is_usual) {
    quantize_nvfp4_by<From, NvQuotient::Corrected>(batch, scale_of);
  } else {
    quantize_nvfp4_by<From, NvQuotient::Divided>(batch, scale_of);
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
