// 16-bit floats on the host, rounded like the conversions of the device: to nearest even, every NaN to 0x7fff.
#pragma once

#include <bit>
#include <cstdint>

namespace emulator {

[[gnu::always_inline]] inline float float_of_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

[[gnu::always_inline]] inline uint16_t bfloat16_of_float(float value) {
  if (value != value) return 0x7fff;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A multiplication moves the exponent field into place and keeps subnormals. Infinity and NaN get an exponent of all
// ones.
[[gnu::always_inline]] inline float float_of_half(uint16_t bits) {
  const float magnitude = std::bit_cast<float>(static_cast<uint32_t>(bits & 0x7fff) << 13) * 0x1p112f;
  const uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | special | sign);
}

inline uint16_t half_of_float(float value) {
  if (value != value) return 0x7fff;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above
  if (magnitude < 0x38800000) {                       // subnormal: an addition rounds at the last bit, 2^-24
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0.5f));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
}

// Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinity, and NaN has all bits but the sign set.
[[gnu::always_inline]] inline float float_of_e4m3(uint8_t code) {
  if ((code & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fc00000u);
  const float magnitude = std::bit_cast<float>(static_cast<uint32_t>(code & 0x7f) << 20) * 0x1p120f;
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

}  // namespace emulator
