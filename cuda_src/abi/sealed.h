// Parameters of attention over sealed blocks, codes of 2 or 4 bits with a scale and a least number for each group, and
// plain caches of the tokens after them.
#pragma once

#include "cuda_src/abi/attention.h"

// Keys or values of sealed blocks: number = least + code * scale. Strides count bytes.
//
//   keys    words [block, head, row, dim]      a row has 16 or 8 tokens; scales [block, head, group, 2, dim]
//   values  words [block, token, head, word]   a word has 16 or 8 channels; scales [block, token, head, group, 2]
//
// The first code of a word is in its lowest bits. The last axis of words and of the scales of keys is contiguous.
struct PcSealedPlane {
  pc_address words;
  pc_address scales;
  pc_int64 block_stride;
  pc_int64 head_stride;
  pc_int64 row_stride;  // of values: between tokens
  pc_int64 scales_block_stride;
  pc_int64 scales_head_stride;
  pc_int64 scales_row_stride;  // between groups of keys, between tokens of values
  pc_int64 group_stride;       // between groups of values
  pc_int64 least_stride;       // from a scale to its least number
  PcFloat scale_type;
  pc_int32 bits;   // of a code
  pc_int32 group;  // tokens of keys, channels of values
  pc_int32 pad;
};

// The first lens[i] tokens of sequence i are in sealed blocks; key, value and table of `attention`, which must be the
// first member, have the others. Sealed blocks have the block size of the caches.
struct PcSealedAttentionParams {
  PcAttentionParams attention;
  PcSealedPlane key;
  PcSealedPlane value;
  PcTable table;  // a row for each row of attention.table
  PcIndices lens;
  pc_int32 num_blocks;
  pc_int32 pad;
};

static_assert(sizeof(PcSealedPlane) == 96, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcSealedAttentionParams, key) == 560, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcSealedAttentionParams, table) == 752, "the layout is part of the ABI");
static_assert(sizeof(PcSealedAttentionParams) == 816, "the layout is part of the ABI");
