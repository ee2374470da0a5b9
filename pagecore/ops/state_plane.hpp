// Recurrent states and their int8 checkpoints, as arguments of the kernels of host and CUDA.
#pragma once

#include <cstdint>

#include "pagecore/ops/args.hpp"

namespace pagecore {

// A plane of states [slot, matrix, V, K], and its codes and scales in other slots. Each slot is C-contiguous.
struct StatePlane {
  char* state = nullptr;
  int8_t* codes = nullptr;
  char* scales = nullptr;
  Float type = Float::F32;   // of state and scales: F32 or BF16
  int64_t num_matrices = 0;  // of a slot
  int64_t num_values = 0;
  int64_t num_keys = 0;
  int64_t state_stride = 0;  // bytes between slots
  int64_t codes_stride = 0;
  int64_t scales_stride = 0;
};

}  // namespace pagecore
