// Formats of stored keys and values; arrays/dtypes/formats.py describes them.
#pragma once

#include <cstdint>

namespace pagecore {

enum class Format : int32_t {
  Plain = 0,  // float32, float16 or bfloat16
  E4M3,       // a factor for the layer or for each head
  E5M2,
  E4M3Token,  // one float32 scale a row
  I8Token,
  I4Token,     // one float32 scale a row, whose 4 low bits hold the zero point
  FP4Block16,  // e2m1; one UE8M0 scale for 16 numbers
  NVFP4,       // e2m1; one e4m3 scale for 16 numbers, times a factor for the layer
  MXFP8,       // e4m3; one UE8M0 scale for 32 numbers
};

}  // namespace pagecore
