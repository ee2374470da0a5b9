// Conversions of stored codes, in registers: to halves, bfloat16 and float32, and from float32.
//
// Codes become halves by moving their fields to those of a half and correcting the exponent by an exact product; halves
// hold every code, and every code of nvfp4 times the scale of its group, without rounding. UE8M0 scales exceed the
// exponents of halves, so that such formats become bfloat16 through float32.
//
//   code                 half
//   e4m3  s eeee mmm     s 0 eeee mmm 0000000    times 2^8
//   e5m2  s eeeee mm     s eeeee mm 00000000
//   e2m1  s ee m         s 000 ee m 000000000    times 2^14
//   int8  b              1024 + (b ^ 0x80)       minus 1152
//   int4  n              1024 + n                minus 1024 + zero point
#pragma once

#include "cuda_src/abi/formats.h"
#include "cuda_src/device/numbers.cuh"

namespace pagecore {

// ---- numbers by their bits

// A power of two by its biased exponent; 255 is NaN.
PC_DEVICE float ue8m0(int byte) {
  return pc_bits_to_float(byte == 255 ? 0x7fc00000u : byte == 0 ? 0x00400000u : static_cast<pc_uint32>(byte) << 23);
}

PC_DEVICE float low_half(pc_uint32 pair) { return pc_to_float(pc_half{static_cast<pc_uint16>(pair)}); }
PC_DEVICE float high_half(pc_uint32 pair) { return pc_to_float(pc_half{static_cast<pc_uint16>(pair >> 16)}); }

// ---- codes to halves: each function takes the two codes with the lower addresses from its lowest bits

// For architectures without an instruction. `wide` has the codes in its bytes 1 and 3.
PC_DEVICE pc_uint32 e4m3_by_bits(pc_uint32 codes) {
  const pc_uint32 wide = pc_permute(codes, 0, 0x1404);
  const pc_uint32 magnitude = wide & 0x7f007f00u;
  const pc_uint32 number = pc_fma_halves((wide & 0x80008000u) | magnitude >> 1, 0x5c005c00u, 0x80008000u);
  const pc_uint32 is_nan = (magnitude + 0x01000100u) & 0x80008000u;
  return number | (is_nan - (is_nan >> 6));
}

PC_DEVICE pc_uint32 halves_of_e4m3(pc_uint32 codes) {
  if constexpr (pc_converts_e4m3) {
    return pc_convert_e4m3(codes);
  } else {
    return e4m3_by_bits(codes);
  }
}

PC_DEVICE float float_of_e4m3(int code) { return low_half(halves_of_e4m3(static_cast<pc_uint32>(code))); }

PC_DEVICE pc_uint32 halves_of_e5m2(pc_uint32 codes) { return pc_permute(codes, 0, 0x1404); }

PC_DEVICE pc_uint32 halves_of_int8(pc_uint32 codes) {
  const pc_uint32 sums = pc_permute(codes ^ 0x8080u, 0x64646464u, 0x4140);
  return pc_fma_halves(sums, 0x3c003c00u, 0xe480e480u);
}

// The high half holds 1024 + 16 n, which is multiplied by 1/16.
PC_DEVICE pc_uint32 halves_of_int4(pc_uint32 codes, int zero_point) {
  const pc_uint32 sums = (pc_permute(codes, 0, 0x4040) & 0x00f0000fu) | 0x64006400u;
  const pc_uint32 zero = static_cast<pc_uint32>(zero_point);
  return pc_fma_halves(sums, 0x2c003c00u, (0xd400u + 16 * zero) << 16 | (0xe400u + zero));
}

PC_DEVICE pc_uint32 halves_of_e2m1(pc_uint32 codes) {
  const pc_uint32 wide = pc_permute(codes << 4, codes, 0x4000);  // a nibble at the top of bytes 1 and 3
  return pc_fma_halves((wide & 0x80008000u) | (wide >> 3 & 0x0e000e00u), 0x74007400u, 0x80008000u);
}

// ---- stored rows

// The scale of some codes of a row, as the conversions take it.
struct CodeScale {
  float factor;      // of a row or group; 1 if there is none
  pc_uint32 halves;  // nvfp4: the factor, in both halves
  int zero_point;    // int4_token
};

PC_DEVICE CodeScale row_scale(PcFormat format, pc_uint32 bits) {
  const bool has_zero = format == PC_I4_TOKEN;
  return {pc_bits_to_float(has_zero ? bits & ~15u : bits), 0, has_zero ? static_cast<int>(bits & 15) : 0};
}

PC_DEVICE CodeScale group_scale(PcFormat format, int byte) {
  if (format != PC_NVFP4) return {ue8m0(byte), 0, 0};
  const pc_uint32 halves = halves_of_e4m3(static_cast<pc_uint32>(byte) * 0x0101u);
  return {low_half(halves), halves, 0};
}

// The two codes in the lowest bits of `codes`, as halves without the factor.
PC_DEVICE pc_uint32 halves_of_codes(PcFormat format, pc_uint32 codes, int zero_point) {
  switch (format) {
    case PC_E5M2: return halves_of_e5m2(codes);
    case PC_I8_TOKEN: return halves_of_int8(codes);
    case PC_I4_TOKEN: return halves_of_int4(codes, zero_point);
    case PC_FP4_BLOCK16:
    case PC_NVFP4: return halves_of_e2m1(codes);
    default: return halves_of_e4m3(codes);
  }
}

// ---- float32 to codes: to nearest even, saturated; NaN becomes 0x7f

PC_DEVICE float magnitude_of(float x) { return pc_bits_to_float(pc_float_to_bits(x) & 0x7fffffffu); }

// A float of kExponent bits of exponent, with bias kBias, and kMantissa bits of mantissa, at most kLargest. Below the
// least normal number a sum with 2^(24 - kBias - kMantissa) rounds at the least code.
template <int kMantissa, int kBias>
PC_DEVICE int small_float_of(float x, float largest) {
  const pc_uint32 bits = pc_float_to_bits(x);
  const int sign = static_cast<int>(bits >> 24 & 0x80);
  if (x != x) return 0x7f;
  const float size = -pc_max(-magnitude_of(x), -largest);
  const pc_uint32 least = static_cast<pc_uint32>(128 - kBias) << 23;
  if (pc_float_to_bits(size) < least) {
    const float step = pc_bits_to_float(static_cast<pc_uint32>(127 + 24 - kBias - kMantissa) << 23);
    return sign | static_cast<int>(pc_float_to_bits(size + step) - pc_float_to_bits(step));
  }
  constexpr int kShift = 23 - kMantissa;
  const pc_uint32 rounded =
      pc_float_to_bits(size) + ((1u << (kShift - 1)) - 1) + (pc_float_to_bits(size) >> kShift & 1);
  return sign | static_cast<int>((rounded >> kShift) - (static_cast<pc_uint32>(127 - kBias) << kMantissa));
}

PC_DEVICE int e4m3_of(float x) { return small_float_of<3, 7>(x, 448.0f); }
PC_DEVICE int e5m2_of(float x) { return small_float_of<2, 15>(x, 57344.0f); }

// To nearest even; NaN becomes 0.
PC_DEVICE int e2m1_of(float x) {
  if (x != x) return 0;
  const float a = magnitude_of(x);
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return code | static_cast<int>(pc_float_to_bits(x) >> 28 & 8);
}

// The code of x times `inverse`: halves up in magnitude. Zero has no sign, but numbers whose product is 0 have.
PC_DEVICE int e2m1_up_of(float x, float inverse) {
  const float a = magnitude_of(x * inverse);
  const int code = (a >= 0.25f) + (a >= 0.75f) + (a >= 1.25f) + (a >= 1.75f) + (a >= 2.5f) + (a >= 3.5f) + (a >= 5.0f);
  return code | (x < 0.0f ? 8 : 0);
}

// The nearest integer, halves away from 0, within low to high, which are at most 511 in magnitude.
PC_DEVICE int integer_of(float x, int low, int high) {
  const float size = -pc_max(-magnitude_of(x), -512.0f);
  const int whole = static_cast<int>(size);
  const int rounded = whole + (size - static_cast<float>(whole) >= 0.5f ? 1 : 0);
  return clamp(x < 0.0f ? -rounded : rounded, low, high);
}

// The exponent of the least power of two that is not below x, for normal x.
PC_DEVICE int ceil_log2(float x) {
  const pc_uint32 bits = pc_float_to_bits(x);
  return static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0 ? 1 : 0);
}

}  // namespace pagecore
