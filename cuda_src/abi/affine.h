// Parameters of the kernels that quantise numbers to codes of 2 or 4 bits with a scale and a least number for each
// group (KIVI), and that restore the numbers.
#pragma once

#include "cuda_src/abi/convert.h"

// The division of a plane among threads.
enum PcAffineTiling : pc_int32 {
  PC_AFFINE_LANES = 0,  // a thread has one lane of a stretch
  PC_AFFINE_QUADS,      // a thread has four adjacent lanes of a stretch
  PC_AFFINE_CHUNKS,     // lanes of a warp share a group, in chunks of 8 adjacent entries; of dequantize_affine as
                        // PC_AFFINE_LANES, with adjacent entries
};

// Blocks of numbers, and what they become: number = least + code * scale. Strides count bytes.
//
//   numbers  [block, matrix, entry, lane]    a group is `group` consecutive entries of a lane
//   words    [block, matrix, word, lane]     32 bits: 16 or 8 consecutive entries of a lane, the first one lowest
//   scales   [block, matrix, group, lane]    the least number is `least_offset` bytes after the scale
//
// Matrices are heads. Of keys, entries are tokens and lanes are channels; of values, entries are channels and lanes are
// tokens.
struct PcAffinePlane {
  pc_address numbers;
  pc_address words;
  pc_address scales;
  pc_int64 numbers_block_stride;
  pc_int64 words_block_stride;
  pc_int64 scales_block_stride;
  pc_int64 numbers_matrix_stride;
  pc_int64 words_matrix_stride;
  pc_int64 scales_matrix_stride;
  pc_int64 entry_stride;
  pc_int64 lane_stride;
  pc_int64 word_stride;
  pc_int64 word_lane_stride;
  pc_int64 group_stride;
  pc_int64 scale_lane_stride;
  pc_int64 least_offset;
  PcFloat type;  // of numbers
  PcFloat scale_type;
  pc_int32 bits;
  pc_int32 group;
  pc_int32 stretch;  // entries after which groups and words both end; of dequantize_affine 8
  PcAffineTiling tiling;
  pc_int32 in_vectors;   // PC_AFFINE_CHUNKS: 8 numbers can be loaded at once
  pc_int32 lanes_shift;  // PC_AFFINE_CHUNKS: 1 << lanes_shift lanes of a warp share a group; otherwise 0
  pc_int32 num_tasks;    // of a block; times the lanes of a task below 2^31, even with one more grid
  // Task i is inner i % inner of middle i / inner % middle of matrix i / inner / middle.
  PcDivisor inner;   // units of lanes; PC_AFFINE_CHUNKS: groups
  PcDivisor middle;  // stretches; PC_AFFINE_CHUNKS: lanes
  pc_int32 pad;
};

struct PcAffineParams {
  PcAffinePlane planes[2];  // the z axis of the grid
  PcConvertPairs pairs;
};

static_assert(__builtin_offsetof(PcAffinePlane, type) == 128, "the layout is part of the ABI");
static_assert(sizeof(PcAffinePlane) == 192, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcAffineParams, pairs) == 384, "the layout is part of the ABI");
static_assert(sizeof(PcAffineParams) == 1456, "the layout is part of the ABI");
