// Rows of numbers to codes and scales: one function for each format, dtype and instruction set.
//
// A row is read twice: for its scale, then for its codes. The formats with groups keep a group in registers.
#pragma once

#include "pagecore/ops/cpu/kernels/codes.hpp"
#include "pagecore/ops/cpu/kernels/convert.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// `scales` is that of the row; `factor` is the given one.
using QuantizeRow = void (*)(const char* source, int64_t dim, char* codes, char* scales, float factor);

PC_FORCE_INLINE void store_part_of_codes(char* row, int64_t offset, IntVec codes, int64_t count) {
  if (count == kLanes) return store_codes(row + offset, codes);
  char padded[kLanes];
  store_codes(padded, codes);
  __builtin_memcpy(row + offset, padded, static_cast<size_t>(count));
}

PC_FORCE_INLINE void store_part_of_nibbles(char* row, int64_t offset, IntVec codes, int64_t count) {
  if (count == kLanes) return store_nibbles(row + offset / 2, codes);
  char padded[kLanes];
  store_nibbles(padded, codes);
  __builtin_memcpy(row + offset / 2, padded, static_cast<size_t>(count / 2));
}

PC_FORCE_INLINE void store_float(char* p, Vec v) {
  const float number = v[0];
  __builtin_memcpy(p, &number, sizeof number);
}

// Bits of |v|, which are in the order of the numbers; NaN is above infinity, or 0 if it is skipped.
template <bool kSkipsNan>
PC_FORCE_INLINE IntVec magnitude_bits(Vec v) {
  const IntVec bits = (IntVec)v & kMagnitudeBits;
  return kSkipsNan ? bits & (bits <= kInfinityBits) : bits;
}

template <Float From, bool kSkipsNan>
PC_FORCE_INLINE IntVec row_magnitude(const char* source, int64_t dim) {
  IntVec most{};
  for_each_vector<From>(source, dim, [&](int64_t, Vec v, int64_t) { most = max(most, magnitude_bits<kSkipsNan>(v)); });
  return max_of_lanes(most);
}

// ---- a scale for a row

template <Float From>
void quantize_float8_token(const char* source, int64_t dim, char* codes, char* scales, float) {
  const Vec amax = (Vec)min(row_magnitude<From, true>(source, dim), splat_bits(kLargestBits));
  const Vec scale = max(amax / splat(448.0f), splat(1e-6f));
  const Vec inverse = splat(1.0f) / scale;
  for_each_vector<From>(source, dim, [&](int64_t i, Vec v, int64_t part) {
    store_part_of_codes(codes, i, e4m3_codes(v * inverse), part);
  });
  store_float(scales, scale);
}

template <Float From>
void quantize_int8_token(const char* source, int64_t dim, char* codes, char* scales, float) {
  const IntVec most = row_magnitude<From, false>(source, dim);
  const IntVec known = most <= kInfinityBits;
  const Vec scale = max((Vec)min(most, splat_bits(kLargestBits)) / splat(127.0f), splat(1e-6f));
  const Vec inverse = splat(1.0f) / scale;
  for_each_vector<From>(source, dim, [&](int64_t i, Vec v, int64_t part) {
    store_part_of_codes(codes, i, integer_codes(rounded(v * inverse), -128.0f, 127.0f) & known, part);
  });
  store_float(scales, (Vec)select(known, (IntVec)scale, splat_bits(0x7fc00000)));
}

template <Float From>
void quantize_int4_token(const char* source, int64_t dim, char* codes, char* scales, float) {
  Vec low{}, high{};
  IntVec most{};
  for_each_vector<From>(source, dim, [&](int64_t, Vec v, int64_t) {
    most = max(most, magnitude_bits<false>(v));
    low = min(v, low);
    high = max(v, high);
  });
  const Vec largest = (Vec)splat_bits(kLargestBits);
  low = max(-max_of_lanes(-low), -largest);
  high = min(max_of_lanes(high), largest);
  const IntVec known = max_of_lanes(most) <= kInfinityBits;
  const Vec scale = max(min(high - low, largest) / splat(15.0f), splat(1e-6f));
  const Vec inverse = splat(1.0f) / scale;
  const IntVec zero = integer_codes(rounded(-low * inverse), 0.0f, 15.0f);
  const Vec zero_point = __builtin_convertvector(zero, Vec);
  for_each_vector<From>(source, dim, [&](int64_t i, Vec v, int64_t part) {
    const IntVec code = integer_codes(rounded(v * inverse) + zero_point, 0.0f, 15.0f);
    store_part_of_nibbles(codes, i, code & known, part);
  });
  store_float(scales, (Vec)select(known, ((IntVec)scale & ~15) | zero, splat_bits(0x7fc00000)));
}

// ---- a scale for a group

// Vectors of a group.
template <int kGroup>
constexpr int kParts = kGroup / kLanes;

template <Float From, int kGroup>
PC_FORCE_INLINE void load_group(const char* source, Vec (&group)[kParts<kGroup>]) {
#pragma GCC unroll 8
  for (int i = 0; i < kParts<kGroup>; ++i) group[i] = load_as_float<From>(source + i * kLanes * kSize<From>);
}

template <bool kSkipsNan, int kCount>
PC_FORCE_INLINE IntVec group_magnitude(const Vec (&group)[kCount]) {
  IntVec most = magnitude_bits<kSkipsNan>(group[0]);
#pragma GCC unroll 8
  for (int i = 1; i < kCount; ++i) most = max(most, magnitude_bits<kSkipsNan>(group[i]));
  return max_of_lanes(most);
}

// The biased exponent of the least power of two that is at least amax / largest. `above` is 2^23 less the mantissa bits
// of `largest`, and `exponent` its exponent; the result is at least `floor`.
PC_FORCE_INLINE IntVec ceil_exponent(IntVec amax, int32_t above, int32_t exponent, int32_t floor) {
  return max(((min(amax, splat_bits(kLargestBits)) + (above - 1)) >> 23) - exponent, splat_bits(floor));
}

// 2^(127 - exponent)
PC_FORCE_INLINE Vec inverse_power(IntVec exponent) { return (Vec)((254 - exponent) << 23); }

template <Float From>
void quantize_fp4_block16(const char* source, int64_t dim, char* codes, char* scales, float) {
  for (int64_t d = 0; d < dim; d += 16) {
    Vec group[kParts<16>];
    load_group<From, 16>(source + d * kSize<From>, group);
    const IntVec amax = group_magnitude<false>(group);
    const IntVec known = amax <= kInfinityBits;
    const IntVec exponent = ceil_exponent(amax, 0x400000, 2, 94);  // 6 is 1.5 * 2^2
    const Vec inverse = inverse_power(exponent);
#pragma GCC unroll 8
    for (int i = 0; i < kParts<16>; ++i) {
      const IntVec sign = (IntVec)(group[i] < 0.0f) & 8;
      const IntVec code = (e2m1_magnitudes_up(group[i] * inverse) | sign) & known;
      store_nibbles(codes + (d + i * kLanes) / 2, code);
    }
    scales[d / 16] = static_cast<char>(select(known, exponent, splat_bits(255))[0]);
  }
}

template <Float From>
void quantize_mxfp8(const char* source, int64_t dim, char* codes, char* scales, float) {
  for (int64_t d = 0; d < dim; d += 32) {
    Vec group[kParts<32>];
    load_group<From, 32>(source + d * kSize<From>, group);
    const IntVec exponent = ceil_exponent(group_magnitude<true>(group), 0x200000, 8, 19);  // 448 is 1.75 * 2^8
    const Vec inverse = inverse_power(exponent);
#pragma GCC unroll 8
    for (int i = 0; i < kParts<32>; ++i) store_codes(codes + d + i * kLanes, e4m3_codes(group[i] * inverse));
    scales[d / 32] = static_cast<char>(exponent[0]);
  }
}

// Codes of a group whose scale is chosen so that the largest number becomes `most`.
struct NvGroup {
  IntVec codes[kParts<16>];
  IntVec scale;  // e4m3, in all lanes
};

PC_FORCE_INLINE NvGroup nv_group(const Vec (&group)[kParts<16>], IntVec amax, Vec most, Vec factor) {
  NvGroup result;
  result.scale = e4m3_codes((Vec)select(amax <= kInfinityBits, min(amax, splat_bits(kLargestBits)), amax) / most);
  const Vec divisor = number_of_e4m3(result.scale) * factor;
  const IntVec used = divisor > 0.0f;  // neither 0 nor NaN
#pragma GCC unroll 8
  for (int i = 0; i < kParts<16>; ++i) result.codes[i] = e2m1_codes(group[i] / divisor) & used;
  return result;
}

PC_FORCE_INLINE float nv_squared_error(const Vec (&group)[kParts<16>], const NvGroup& chosen, Vec factor) {
  Vec squares[kParts<16>];
  const Vec scale = number_of_e4m3(chosen.scale);
#pragma GCC unroll 8
  for (int i = 0; i < kParts<16>; ++i) {
    const Vec read = rounded(number_of_e2m1(chosen.codes[i]) * scale * factor);
    squares[i] = rounded((group[i] - read) * (group[i] - read));
  }
  // In the order of sum(), for vectors of any length.
  for (int half = kParts<16> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) squares[i] += squares[i + half];
  }
  return sum(squares[0]);
}

template <Float From, bool kFourOverSix>
void quantize_nvfp4(const char* source, int64_t dim, char* codes, char* scales, float factor) {
  const Vec factors = splat(factor), six = splat(6.0f) * factors, four = splat(4.0f) * factors;
  for (int64_t d = 0; d < dim; d += 16) {
    Vec group[kParts<16>];
    load_group<From, 16>(source + d * kSize<From>, group);
    const IntVec amax = group_magnitude<false>(group);
    NvGroup chosen = nv_group(group, amax, six, factors);
    if constexpr (kFourOverSix) {
      const NvGroup other = nv_group(group, amax, four, factors);
      if (nv_squared_error(group, other, factors) < nv_squared_error(group, chosen, factors)) chosen = other;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kParts<16>; ++i) store_nibbles(codes + (d + i * kLanes) / 2, chosen.codes[i]);
    scales[d / 16] = static_cast<char>(chosen.scale[0]);
  }
}

// ---- choice

template <Float From>
PC_FORCE_INLINE QuantizeRow quantizer_from(Format format, bool four_over_six) {
  switch (format) {
    case Format::E4M3Token: return quantize_float8_token<From>;
    case Format::I8Token: return quantize_int8_token<From>;
    case Format::I4Token: return quantize_int4_token<From>;
    case Format::FP4Block16: return quantize_fp4_block16<From>;
    case Format::NVFP4: return four_over_six ? quantize_nvfp4<From, true> : quantize_nvfp4<From, false>;
    default: return quantize_mxfp8<From>;
  }
}

// The function of a format that computes scales.
inline QuantizeRow quantizer(Float from, Format format, bool four_over_six) {
  return with_float(from, [&]<Float From>() { return quantizer_from<From>(format, four_over_six); });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
