// Parameters of merges of attention results over different keys. Strides count elements.
#pragma once

#include "cuda_src/abi/moves.h"

// Two parts.
struct PcMaskedMergeParams {
  PcMergeParams merge;
  pc_address mask;       // of a byte for each token, 0 where part b is ignored; 0 without a mask
  pc_int64 mask_stride;  // bytes
};

// Any number of parts for each token. A token that has none has output 0 and lse -inf.
struct PcMergeManyParams {
  PcRows parts;  // [part, head, dim]: those of the first token, or with cu_parts those of all tokens
  PcRows out;    // [num_tokens, num_heads, dim], of the same type
  PcLse lses;    // [part, head]
  PcLse lse;
  pc_int64 token_stride;  // from the parts of a token to those of the next; 0 with cu_parts
  pc_int64 lse_token_stride;
  PcIndices cu_parts;  // the parts of token t are cu_parts[t] to cu_parts[t + 1] - 1; absent: each has num_parts
  PcDivisor num_heads;
  pc_int32 num_parts;      // of each token; with cu_parts of all
  pc_int32 num_rows;       // tokens times heads; times the lanes of a row below 2^31, even with one more grid
  pc_int32 unit;           // elements that a thread moves at once: 1, 2, 4 or 8
  pc_int32 units_per_row;  // of a head
  pc_int32 lanes_shift;    // 1 << lanes_shift lanes of one warp process a row
  pc_int32 pad;
};

static_assert(__builtin_offsetof(PcMaskedMergeParams, mask) == 176, "the layout is part of the ABI");
static_assert(sizeof(PcMaskedMergeParams) == 192, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcMergeManyParams, cu_parts) == 112, "the layout is part of the ABI");
static_assert(sizeof(PcMergeManyParams) == 176, "the layout is part of the ABI");
