// What the planner tells a kernel, on the host, on CUDA and in the emulator: plain structs of fixed layout.
#pragma once

#ifndef PC_ABI_INT32
#define PC_ABI_INT32
typedef int pc_int32;
#endif

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
