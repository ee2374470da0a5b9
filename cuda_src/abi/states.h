// Parameters of the kernels that convert recurrent states: numbers to int8 codes with a scale for each key, and back.
#pragma once

#include "cuda_src/abi/moves.h"

enum : pc_int32 {
  PC_STATE_THREADS = 512,
  PC_STATE_WARPS = PC_STATE_THREADS / 32,
  PC_STATE_LANES = 32,      // most units of a stretch
  PC_STATE_BYTES = 16,      // of a unit of more than one number
  PC_STATE_MAX_KEYS = 256,  // of a stretch: 32 units of 8 numbers
  PC_MAX_STATES = 96,       // planes of a launch
  // The largest magnitudes that each warp has found, and the scales of the stretch.
  PC_STATE_SHARED_BYTES = (PC_STATE_WARPS + 1) * PC_STATE_MAX_KEYS * 4,
};

// Planes of one shape and their codes and scales: slots of matrices [values, keys], each C-contiguous.
struct PcStateParams {
  pc_int64 state_stride;  // bytes between slots
  pc_int64 codes_stride;
  pc_int64 scales_stride;
  pc_int32 num_values;
  pc_int32 num_keys;
  PcDivisor stretches;   // of a matrix
  pc_int32 lanes_shift;  // 1 << lanes_shift units in a stretch of keys
  pc_int32 in_units;     // 1: a thread moves 16 bytes of numbers at once; 0: one number
  pc_int32 pad;
  pc_address states[PC_MAX_STATES];
  pc_address codes[PC_MAX_STATES];
  pc_address scales[PC_MAX_STATES];
  pc_int32 pairs[PC_MAX_PAIRS][2];  // slot of the state, slot of the codes
};

static_assert(__builtin_offsetof(PcStateParams, states) == 56, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcStateParams, pairs) == 2360, "the layout is part of the ABI");
static_assert(sizeof(PcStateParams) == 3384, "the layout is part of the ABI");
