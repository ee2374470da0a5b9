// bfloat16 to float32 and back, to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace pagecore::cpu {

inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1), quiet = bits | 0x00400000;
  return static_cast<uint16_t>((x == x ? rounded : quiet) >> 16);
}

}  // namespace pagecore::cpu
