// Parameters of the kernels of the emulator's own tests.
#pragma once

#include "cuda_src/device/primitives.cuh"

struct PcProbe {
  pc_address in;
  pc_address out;
  pc_address extra;
  pc_int32 n;
  pc_int32 m;
};
