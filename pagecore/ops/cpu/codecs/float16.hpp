// float16 to float32 and back, to nearest even, on processors without instructions for it.
#pragma once

#include <bit>
#include <cstdint>

namespace pagecore::cpu {

inline float from_f16(uint16_t half) {
  // 2^112 is the difference of the exponent biases; multiplying by it also handles subnormals.
  const float number = std::bit_cast<float>((half & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(number) | special | (half & 0x8000u) << 16);
}

inline uint16_t to_f16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits & 0x80000000u, magnitude = bits ^ sign;
  // Adding 0.5 leaves the rounded bits of a subnormal at the low end of the sum.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>((magnitude >= 0x47800000u ? special : finite) | sign >> 16);
}

}  // namespace pagecore::cpu
