// Elements of a float type that is known only at run time.
#pragma once

#include "cuda_src/abi/types.h"
#include "cuda_src/device/primitives.cuh"

namespace pagecore {

PC_DEVICE float load_float(PcFloat type, pc_address data, pc_int64 i) {
  if (type == PC_FLOAT32) return Global<float>(data).load(i);
  if (type == PC_FLOAT16) return pc_to_float(Global<pc_half>(data).load(i));
  return pc_to_float(Global<pc_bfloat16>(data).load(i));
}

PC_DEVICE void store_float(PcFloat type, pc_address data, pc_int64 i, float x) {
  if (type == PC_FLOAT32) {
    Global<float>(data).store(i, x);
  } else if (type == PC_FLOAT16) {
    Global<pc_half>(data).store(i, pc_from_float<pc_half>(x));
  } else {
    Global<pc_bfloat16>(data).store(i, pc_from_float<pc_bfloat16>(x));
  }
}

}  // namespace pagecore
