// Rows of codes to numbers: one function for each format, dtype and instruction set.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/codes.hpp"
#include "pagecore/ops/cpu/kernels/simd/convert.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// `scales` is that of the row; `factor` is the given one.
using DequantizeRow = void (*)(const char* codes, const char* scales, int64_t dim, float factor, char* target);

template <Format kFormat>
constexpr bool kIsPacked = kFormat == Format::I4Token || kFormat == Format::FP4Block16 || kFormat == Format::NVFP4;

// kLanes codes from index `d` of a row on; those past `count` are 0.
template <Format kFormat>
PC_FORCE_INLINE IntVec codes_at(const char* codes, int64_t d, int64_t count) {
  const char* p = codes + (kIsPacked<kFormat> ? d / 2 : d);
  char padded[kLanes] = {};
  if (count < kLanes) {
    __builtin_memcpy(padded, p, static_cast<size_t>(kIsPacked<kFormat> ? count / 2 : count));
    p = padded;
  }
  return kIsPacked<kFormat> ? load_nibbles(p) : load_codes(p);
}

template <Format kFormat>
PC_FORCE_INLINE Vec numbers_of(IntVec codes) {
  if constexpr (kFormat == Format::E4M3 || kFormat == Format::E4M3Token || kFormat == Format::MXFP8) {
    return number_of_e4m3(codes);
  } else if constexpr (kFormat == Format::E5M2) {
    return number_of_e5m2(codes);
  } else if constexpr (kFormat == Format::I8Token) {
    return __builtin_convertvector(codes << 24 >> 24, Vec);
  } else if constexpr (kFormat == Format::I4Token) {
    return __builtin_convertvector(codes, Vec);
  } else {
    return number_of_e2m1(codes);
  }
}

// Numbers from index `d` on, scaled; at most one group of them is in a vector.
template <Format kFormat>
PC_FORCE_INLINE Vec scaled_at(Vec numbers, const char* scales, int64_t d, float factor) {
  if constexpr (kFormat == Format::E4M3 || kFormat == Format::E5M2) {
    return numbers * factor;
  } else if constexpr (kFormat == Format::FP4Block16) {
    return numbers * number_of_ue8m0(static_cast<uint8_t>(scales[d / 16]));
  } else if constexpr (kFormat == Format::MXFP8) {
    return numbers * number_of_ue8m0(static_cast<uint8_t>(scales[d / 32]));
  } else if constexpr (kFormat == Format::NVFP4) {
    return rounded(numbers * number_of_e4m3(splat_bits(static_cast<uint8_t>(scales[d / 16])))) * factor;
  } else {
    uint32_t bits;
    __builtin_memcpy(&bits, scales, sizeof bits);
    if constexpr (kFormat == Format::I4Token) {
      numbers = numbers - static_cast<float>(bits & 15);
      bits &= ~15u;
    }
    return numbers * (Vec)splat_bits(static_cast<int32_t>(bits));
  }
}

template <Format kFormat, Float To>
void dequantize_row(const char* codes, const char* scales, int64_t dim, float factor, char* target) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    const int64_t count = dim - d < kLanes ? dim - d : kLanes;
    const Vec numbers = numbers_of<kFormat>(codes_at<kFormat>(codes, d, count));
    store_part<To>(target, d, scaled_at<kFormat>(numbers, scales, d, factor), count);
  }
}

template <Float To>
PC_FORCE_INLINE DequantizeRow dequantizer_to(Format format) {
  switch (format) {
    case Format::E4M3: return dequantize_row<Format::E4M3, To>;
    case Format::E5M2: return dequantize_row<Format::E5M2, To>;
    case Format::E4M3Token: return dequantize_row<Format::E4M3Token, To>;
    case Format::I8Token: return dequantize_row<Format::I8Token, To>;
    case Format::I4Token: return dequantize_row<Format::I4Token, To>;
    case Format::FP4Block16: return dequantize_row<Format::FP4Block16, To>;
    case Format::NVFP4: return dequantize_row<Format::NVFP4, To>;
    default: return dequantize_row<Format::MXFP8, To>;
  }
}

inline DequantizeRow dequantizer(Format format, Float to) {
  return with_float(to, [&]<Float To>() { return dequantizer_to<To>(format); });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
