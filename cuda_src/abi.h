// What the planner tells a kernel, on the host, on CUDA and in the emulator: plain structs of fixed layout.
#pragma once

typedef int pc_int32;
typedef long long pc_int64;
typedef unsigned long long pc_address;  // of device memory; 0: absent

// One piece of a batch's attention: some consecutive queries of one sequence against some consecutive keys of it.
//
//   queries: rows query_begin .. query_begin + query_count of the packed query array
//   keys:    positions key_begin .. key_end of the sequence; empty when its queries may attend to nothing
//
// Heads are no part of it: they are an axis of the grid. The items of one query tile are adjacent, in order of their
// keys. With num_splits == 1 an item writes the output itself (partial is -1). Otherwise it writes query_count partial
// rows from `partial` on, and whoever merges walks the items with split == 0: the rows of split s stand query_count * s
// further.
struct PcWorkItem {
  pc_int32 sequence;     // place in the batch
  pc_int32 query_begin;  // row of the packed queries
  pc_int32 query_count;  // >= 1
  pc_int32 key_begin;    // position in the sequence
  pc_int32 key_end;
  pc_int32 partial;     // first partial row, or -1
  pc_int32 split;       // which of the splits
  pc_int32 num_splits;  // of this query tile
};

static_assert(sizeof(pc_int32) == 4, "a work item is made of 32-bit integers");
static_assert(sizeof(PcWorkItem) == 32, "kernels read a work item as two 16-byte vectors");
static_assert(__builtin_offsetof(PcWorkItem, key_begin) == 12, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcWorkItem, num_splits) == 28, "the layout is part of the ABI");

// ---- arrays, as kernels are told of them. Strides count elements; the last axis is contiguous.

// The numbers of the dtype table, for the dtypes that kernels compute with.
enum PcFloat : pc_int32 { PC_FLOAT32 = 0, PC_FLOAT16 = 1, PC_BFLOAT16 = 2 };

// Query, key, value or output, logically [token, head, dim].
struct PcRows {
  pc_address data;
  pc_int64 token_stride;
  pc_int64 head_stride;
};

// One plane of a cache, logically [block, token, head, dim].
struct PcCache {
  pc_address data;
  pc_int64 block_stride;
  pc_int64 token_stride;
  pc_int64 head_stride;
};

// One axis of int32 or int64.
struct PcIndices {
  pc_address data;
  pc_int64 stride;
  pc_int32 size;
  pc_int32 wide;  // 1: int64
};

// A block table: rows of int32 or int64, each contiguous.
struct PcTable {
  pc_address data;
  pc_int64 row_stride;
  pc_int32 num_rows;
  pc_int32 width;
  pc_int32 wide;  // 1: int64
  pc_int32 pad;
};

static_assert(sizeof(PcRows) == 24, "the layout is part of the ABI");
static_assert(sizeof(PcCache) == 32, "the layout is part of the ABI");
static_assert(sizeof(PcIndices) == 24, "the layout is part of the ABI");
static_assert(sizeof(PcTable) == 32, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcTable, wide) == 24, "the layout is part of the ABI");
