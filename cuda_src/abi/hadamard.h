// Parameters of the kernel that transforms rows by Hadamard matrices.
#pragma once

#include "cuda_src/abi/moves.h"

enum : pc_int32 {
  PC_HADAMARD_THREADS = 128,
  PC_HADAMARD_NUMBERS = 8,  // of a lane
};

// Rows [outer, inner] of blocks of 8 << lanes_shift numbers, up to 256. Source and target are one array or apart.
struct PcHadamardParams {
  pc_address source;
  pc_address target;
  pc_int64 source_outer_stride;  // bytes
  pc_int64 source_inner_stride;
  pc_int64 target_outer_stride;
  pc_int64 target_inner_stride;
  PcDivisor blocks_per_row;
  PcDivisor inner;
  pc_int32 num_blocks;   // of all rows
  pc_int32 lanes_shift;  // 1 << lanes_shift lanes for each block
  pc_int32 in_units;     // 1: the numbers of a lane are moved in vectors; 0: one by one
  float scale;
};

static_assert(__builtin_offsetof(PcHadamardParams, blocks_per_row) == 48, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcHadamardParams, num_blocks) == 72, "the layout is part of the ABI");
static_assert(sizeof(PcHadamardParams) == 88, "the layout is part of the ABI");
