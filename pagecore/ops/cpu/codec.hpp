// Arguments of quantize and dequantize on the host: rows of numbers, of codes and of scales. Plain struct: see
// args.hpp.
#pragma once

#include <cstdint>

#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu {

struct Codec {
  char* numbers = nullptr;
  char* codes = nullptr;
  char* scales = nullptr;  // null if the format stores none
  int64_t numbers_stride = 0;
  int64_t codes_stride = 0;
  int64_t scales_stride = 0;
  int64_t num_rows = 0;
  int64_t dim = 0;
  Float type = Float::F32;  // of the numbers
  Format format = Format::E4M3;
  bool four_over_six = false;
  const float* factors = nullptr;  // of row i: factors[i % num_factors]; 1 if there are none
  int64_t num_factors = 0;
};

}  // namespace pagecore::cpu
