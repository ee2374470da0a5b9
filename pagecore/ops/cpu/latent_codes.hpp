// Quantisation of single numbers and groups: e4m3 and e2m1, saturating, to nearest even.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace pagecore::cpu {

inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Subnormals are multiplied as well: 2^112 is the difference of the exponents' biases.
inline float from_f16(uint16_t bits) {
  const float number = std::bit_cast<float>((bits & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(number) | special | (bits & 0x8000u) << 16);
}

inline uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1), quiet = bits | 0x00400000;
  return static_cast<uint16_t>((x == x ? rounded : quiet) >> 16);
}

inline constexpr float kE4M3Max = 448.0f, kE2M1Max = 6.0f;
inline constexpr char kE4M3NaN = 0x7f;

// Infinities become the greatest finite number, NaN becomes kE4M3NaN.
inline uint8_t to_e4m3(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 24 & 0x80;
  const float magnitude = std::min(std::fabs(x), kE4M3Max);  // NaN stays
  const auto size = std::bit_cast<uint32_t>(magnitude);
  const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  // Adding 2^14, whose last place is 2^-9, rounds to a multiple of the least subnormal.
  const uint32_t subnormal = std::bit_cast<uint32_t>(magnitude + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  const uint32_t finite = magnitude < 0x1p-6f ? subnormal : normal;
  return static_cast<uint8_t>(x == x ? sign | finite : kE4M3NaN);
}

inline float from_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code & 0x80 ? -size : size;
}

inline uint8_t to_e2m1(float x) {
  const float size = std::fabs(x);
  const int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                   (size >= 3.5f) + (size > 5.0f);
  return static_cast<uint8_t>(code | (std::signbit(x) ? 8 : 0));
}

// The greatest magnitude; NaN counts as nothing, infinity as the greatest finite number.
inline float greatest(const float* x, int64_t count) {
  float found = 0.0f;
  for (int64_t i = 0; i < count; ++i) found = std::fabs(x[i]) > found ? std::fabs(x[i]) : found;
  return std::min(found, std::numeric_limits<float>::max());
}

// The least power of two that is not below x, for normal x > 0.
inline float power_of_two_above(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits & 0x007fffff) == 0 ? bits : (bits & 0x7f800000) + 0x00800000);
}

}  // namespace pagecore::cpu
