// What the kernels that look at index arrays are told; they write nothing but the least number of an offender.
#pragma once

#include "abi.h"

// Each id is to be lowest .. limit - 1.
struct PcIdParams {
  PcIndices ids;
  pc_int64 lowest;
  pc_int64 limit;
  pc_address offender;  // unsigned 64-bit: the least place of an id that is not, or what was there where that is less
};

// Each sequence is to have a length that its row of the table holds, a row that is there, and blocks that are there.
struct PcBatchParams {
  PcTable table;
  PcIndices rows;           // absent: sequence i is row i of the table
  PcIndices seq_lens;       // [num_sequences]
  PcIndices cu_query_lens;  // [num_sequences + 1], from 0 on and never falling; absent: one query for each sequence
  pc_int64 num_tokens;      // what lengths sum up to exactly; -1: anything
  pc_int64 num_queries;     // that cu_query_lens may count up to
  pc_int64 num_blocks;
  pc_int64 block_size;
  pc_address
      offender;  // unsigned 64-bit: the least sequence of which something is not so; num_sequences: the sum is not
};

static_assert(sizeof(PcIdParams) == 48, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcBatchParams, num_tokens) == 104, "the layout is part of the ABI");
static_assert(sizeof(PcBatchParams) == 144, "the layout is part of the ABI");
