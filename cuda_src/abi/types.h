// Structs that the host and the kernels share: work items and arrays. All structs are plain data of fixed layout, the
// same for g++, NVRTC and the emulator.
#pragma once

typedef short pc_int16;
typedef int pc_int32;
typedef long long pc_int64;
typedef unsigned long long pc_address;  // of device memory; 0: absent

// A unit of attention work: consecutive queries of one sequence against consecutive keys of the sequence.
//
//   queries: rows query_begin .. query_begin + query_count - 1 of the packed query array
//   keys:    positions key_begin .. key_end - 1 of the sequence; empty if its queries attend to nothing
//
// An item covers all heads, which are an axis of the grid. The items of one query tile are adjacent, in the order of
// their keys. With num_splits == 1 an item writes the output itself (partial is -1). Otherwise it writes query_count
// partial rows from `partial` on. The partial rows of split s of a tile follow those of split 0 by s * query_count.
struct PcWorkItem {
  pc_int32 sequence;     // index in the batch
  pc_int32 query_begin;  // row of the packed queries
  pc_int32 query_count;  // >= 1
  pc_int32 key_begin;    // position in the sequence
  pc_int32 key_end;
  pc_int32 partial;     // first partial row, or -1
  pc_int32 split;       // 0 .. num_splits - 1
  pc_int32 num_splits;  // of the query tile
};

static_assert(sizeof(pc_int32) == 4, "a work item is made of 32-bit integers");
static_assert(sizeof(PcWorkItem) == 32, "kernels read a work item as two 16-byte vectors");
static_assert(__builtin_offsetof(PcWorkItem, key_begin) == 12, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcWorkItem, num_splits) == 28, "the layout is part of the ABI");

// ---- arrays. Strides count elements; the last axis is contiguous.

// Dtypes that kernels compute with, numbered as in the dtype table.
enum PcFloat : pc_int32 { PC_FLOAT32 = 0, PC_FLOAT16 = 1, PC_BFLOAT16 = 2 };

// Packed query, key, value or output: [token, head, dim].
struct PcRows {
  pc_address data;
  pc_int64 token_stride;
  pc_int64 head_stride;
};

// One plane of a cache: [block, token, head, dim].
struct PcCache {
  pc_address data;
  pc_int64 block_stride;
  pc_int64 token_stride;
  pc_int64 head_stride;
};

// A one-dimensional array of int32 or int64.
struct PcIndices {
  pc_address data;
  pc_int64 stride;
  pc_int32 size;
  pc_int32 wide;  // 1: int64
};

// A block table: contiguous rows of int32 or int64.
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
