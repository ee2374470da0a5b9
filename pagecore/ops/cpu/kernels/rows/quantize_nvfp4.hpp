// Rows of numbers to codes and scales of NVFP4: one function for each dtype.
#pragma once

#include "pagecore/ops/cpu/kernels/rows/quantize_groups.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The scales of groups whose largest numbers become `most`, and their codes of e4m3; NaN for a group with NaN.
PC_FORCE_INLINE IntVec nv_scales(IntVec amax, Vec most, Vec& scales) {
  const Vec largest = amax == kInfinityBits ? splat(kLargest) : (Vec)amax;
  return e4m3_codes(largest / most, scales);
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
  Words,      // by e2m1_quad_of_quotients(): for divisors with four leading bits
};

// scale_of(magnitudes, scales, divisors) writes the bytes of the scales and the divisors of groups.
template <Float From, NvQuotient kQuotient, typename ScaleOf>
PC_FORCE_INLINE void quantize_nvfp4_by(const RowBatch& batch, ScaleOf&& scale_of) {
  const auto numbers_of = [=](IntVec amax, IntVec& bytes, Vec& divisor, Vec& extra) __attribute__((always_inline)) {
    scale_of(amax, bytes, divisor);
    if constexpr (kQuotient == NvQuotient::Corrected) extra = splat(1.0f) / divisor;
    if constexpr (kQuotient == NvQuotient::Words) extra = (Vec)e2m1_quarter_pair<From>(divisor);
    return ((divisor > 0.0f) & ~((Vec)amax <= 7.5f * divisor)) |
           needs_floats<From>(divisor, divisor, kLeastE2m1Divisor);
  };
  const auto codes_of = [](auto usual) {
    return [](const char* from, const float* divisors, const float* extras) __attribute__((always_inline)) {
      if constexpr (kQuotient == NvQuotient::Words && decltype(usual)::value) {
        return e2m1_quad_of_quotients<From>(from, extras);
      } else {
        return e2m1_quad_even<From>(from, [=](Vec v, int i) __attribute__((always_inline)) {
          const Vec divisor = quad_factor<From, 16>(divisors, i);
          if constexpr (kQuotient != NvQuotient::Corrected) return v / divisor;
          return quotient(v, divisor, quad_factor<From, 16>(extras, i));
        });
      }
    };
  };
  for_each_group<From, 16, 2, false>(batch, numbers_of, codes_of);
}

template <Float From>
void quantize_nvfp4(const RowBatch& batch) {
  const Vec factors = splat(batch.factor), six = splat(6.0f) * factors;
  const auto scale_of = [=](IntVec amax, IntVec& bytes, Vec& divisor) __attribute__((always_inline)) {
    bytes = nv_scales(amax, six, divisor);
    divisor *= factors;
  };
  const bool has_usual_factor = batch.factor >= 0x1p-60f && batch.factor <= 0x1p60f;
  const bool is_power = (bits_of(batch.factor)[0] & 0x7fffff) == 0;
  if (has_usual_factor && is_power) {
    quantize_nvfp4_by<From, NvQuotient::Words>(batch, scale_of);
  } else if (has_usual_factor) {
    quantize_nvfp4_by<From, NvQuotient::Corrected>(batch, scale_of);
  } else {
    quantize_nvfp4_by<From, NvQuotient::Divided>(batch, scale_of);
  }
}

// The codes of a group with one scale, and their squared error. The scale is in all lanes.
PC_FORCE_INLINE float nv_choice(const Vec (&group)[kParts<16>], Vec number, Vec factor, IntVec (&codes)[kParts<16>]) {
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
    Vec by_six, by_four;
    const IntVec of_six = nv_scales(amax, splat(6.0f) * factors, by_six);
    const IntVec of_four = nv_scales(amax, splat(4.0f) * factors, by_four);
    const float error = nv_choice(group, by_six, factors, six);
    const bool is_four = nv_choice(group, by_four, factors, four) < error;
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
