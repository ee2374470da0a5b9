// Numbers of sealed blocks: codes of 2 or 4 bits with the scale and the least number of their group.
#pragma once

#include "cuda_src/abi/types.h"
#include "cuda_src/attention/tiles/tiles.cuh"
#include "cuda_src/device/formats.cuh"
#include "cuda_src/device/units.cuh"

namespace pagecore {

// The scale and the least number of a group.
struct ScalePair {
  float scale;
  float least;
};

// Two adjacent numbers of a dtype, from number `at` on.
PC_DEVICE void load_two(PcFloat type, const Shared<pc_uint8>& row, int at, float& x, float& y) {
  if (type == PC_FLOAT32) {
    x = row.template as<float>().load(at);
    y = row.template as<float>().load(at + 1);
    return;
  }
  const pc_uint32 pair = row.template as<pc_uint32>().load(at / 2);
  x = type == PC_FLOAT16 ? low_of<pc_half>(pair) : low_of<pc_bfloat16>(pair);
  y = type == PC_FLOAT16 ? high_of<pc_half>(pair) : high_of<pc_bfloat16>(pair);
}

// The number of a code.
PC_DEVICE float number_of_code(pc_uint32 code, const ScalePair& pair) {
  constexpr pc_uint32 kMagic = 0x4b000000u;  // 2^23: the last bits are an integer
  return pc_fma(pc_bits_to_float(kMagic | code) - 8388608.0f, pair.scale, pair.least);
}

// A number in the range of T: its rounded scale and least number can take it past the largest float16.
template <typename T>
PC_DEVICE float in_range_of(float x) {
  if (!IsSame<T, pc_half>::kValue || magnitude_of(x) <= 65504.0f || magnitude_of(x) >= 131008.0f) return x;
  return x < 0.0f ? -65504.0f : 65504.0f;
}

}  // namespace pagecore
