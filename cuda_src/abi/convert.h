// Parameters of the kernels that convert stored rows between formats.
#pragma once

#include "cuda_src/abi/formats.h"
#include "cuda_src/abi/latent_rows.h"

// Pairs of a source block and a target block. Pairs with a block below `lowest` or past the arrays are skipped.
struct PcConvertPairs {
  pc_address on_device;  // pairs in device memory, int32 or int64 [num_pairs, 2] of any strides; absent: `pairs`
  pc_int64 pair_stride;  // elements
  pc_int64 column_stride;
  pc_int32 wide;  // 1: int64
  pc_int32 num_pairs;
  pc_int32 lowest;
  pc_int32 num_source_blocks;
  pc_int32 num_target_blocks;
  pc_int32 identity;  // 1: pair i is (i, i), and no pairs are given
  pc_int32 pairs[PC_MAX_PAIRS][2];
};

// Rows of keys or values, converted from any format to any other.
struct PcConvertParams {
  PcStored source;
  PcStored target;
  pc_address source_factors;  // float32 [num_heads] or one number: given factors; absent: `source_factor` for all heads
  pc_address target_factors;
  float source_factor;
  float target_factor;
  PcDivisor num_heads;
  pc_int32 dim;
  pc_int32 num_rows;           // of a block; times the lanes of a row below 2^31, even with one more grid
  pc_int32 lanes_shift;        // 1 << lanes_shift lanes of a warp process a row
  pc_int32 source_in_vectors;  // 8 elements or codes can be moved at once
  pc_int32 target_in_vectors;
  pc_int32 is_4over6;             // PC_NVFP4: of the scales for a largest code of 6 and of 4, take the better
  pc_int16 source_factor_stride;  // elements: 1, or 0 if all heads have one number
  pc_int16 target_factor_stride;
  PcConvertPairs pairs;
};

// Rows of latents, of which at least one side has packed rows.
struct PcLatentConvertParams {
  PcLatentRows source;
  PcLatentRows target;
  float source_factor;  // PC_LATENT_ROW_E4M3
  float target_factor;
  pc_int32 block_size;
  pc_int32 pad;
  PcConvertPairs pairs;
};

static_assert(__builtin_offsetof(PcConvertPairs, pairs) == 48, "the layout is part of the ABI");
static_assert(sizeof(PcConvertPairs) == 1072, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcConvertParams, pairs) == 208, "the layout is part of the ABI");
static_assert(sizeof(PcConvertParams) == 1280, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcLatentConvertParams, pairs) == 160, "the layout is part of the ABI");
static_assert(sizeof(PcLatentConvertParams) == 1232, "the layout is part of the ABI");
