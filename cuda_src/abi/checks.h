// Parameters of the debug kernels that validate index arrays. Their only output is the smallest index of an invalid
// entry.
#pragma once

#include "cuda_src/abi/types.h"

// Valid ids are lowest .. limit - 1.
struct PcIdParams {
  PcIndices ids;
  pc_int64 lowest;
  pc_int64 limit;
  pc_address offender;  // unsigned 64-bit: minimum of its value before the launch and of the indices of invalid ids
};

// A sequence is valid if its row is in the table, the row can hold its length, and the blocks of the row are in the
// cache.
struct PcBatchParams {
  PcTable table;
  PcIndices rows;           // absent: sequence i is row i of the table
  PcIndices seq_lens;       // [num_sequences]
  PcIndices cu_query_lens;  // [num_sequences + 1], starts with 0, non-decreasing; absent: one query for each sequence
  pc_int64 num_tokens;      // required sum of the lengths; -1: any
  pc_int64 num_queries;     // largest valid value of cu_query_lens
  pc_int64 num_blocks;
  pc_int64 block_size;
  pc_address offender;  // unsigned 64-bit: the smallest invalid sequence; num_sequences if only the sum is wrong
};

static_assert(sizeof(PcIdParams) == 48, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcBatchParams, num_tokens) == 104, "the layout is part of the ABI");
static_assert(sizeof(PcBatchParams) == 144, "the layout is part of the ABI");
