// Parameters of the kernels that move data: writes into a cache, copies between arrays, changed table entries, merges.
#pragma once

#include "cuda_src/abi/types.h"

// Division of numbers below 2^31 by a constant: n / divisor == (n * multiplier) >> (31 + shift), in 64 bits.
struct PcDivisor {
  pc_int32 divisor;
  unsigned int multiplier;  // 2^(31 + shift) / divisor, rounded up
  pc_int32 shift;           // 1 << shift: the least power of two >= divisor
};

static_assert(sizeof(PcDivisor) == 12, "the layout is part of the ABI");

// ---- block tables

// The kernel stores `block` in element `index` of the table's memory.
struct PcTableEntry {
  pc_int64 index;
  pc_int32 block;
  pc_int32 pad;
};

// The entries of one batch have different indices. Their number is in device memory, so that a captured graph serves
// every step.
struct PcTableParams {
  pc_address entries;  // PcTableEntry[capacity], at a multiple of 16
  pc_address count;    // int32
  pc_address table;    // int32[size]
  pc_int64 size;
  pc_int32 capacity;
  pc_int32 pad;
};

static_assert(sizeof(PcTableEntry) == 16, "kernels read an entry as one 16-byte vector");
static_assert(__builtin_offsetof(PcTableEntry, block) == 8, "the layout is part of the ABI");
static_assert(sizeof(PcTableParams) == 40, "the layout is part of the ABI");

// ---- write_kv

// Keys or values of new tokens, and the cache that they are written to.
struct PcWritePlane {
  PcRows rows;        // [num_tokens, num_heads, dim]
  PcCache cache;      // [num_blocks, block_size, num_heads, dim]
  pc_address scales;  // float32: divisors of the elements of a row; absent: `scale` for all rows
  float scale;
  pc_int32 unit;  // elements that a thread moves at once: 1, 2, 4 or 8
  PcDivisor units_per_token;
  PcDivisor units_per_row;  // row: a head, or all heads of a token if they are contiguous in both arrays
  pc_int32 num_units;       // of all tokens; below 2^31 even with the units of one more grid
  pc_int32 scale_stride;    // elements: 1, or 0 if all rows have one number
};

struct PcWriteParams {
  PcWritePlane planes[2];
  PcIndices slots;     // [num_tokens]; tokens with slots outside 0 .. num_slots - 1 are skipped
  pc_int64 num_slots;  // of the cache
  PcDivisor block_size;
  pc_int32 block_shift;       // block_size == 1 << block_shift, or -1
  pc_int32 units_per_thread;  // at most 4
  pc_int32 pad;
};

static_assert(sizeof(PcWritePlane) == 104, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcWritePlane, units_per_token) == 72, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcWriteParams, slots) == 208, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcWriteParams, block_size) == 240, "the layout is part of the ABI");
static_assert(sizeof(PcWriteParams) == 264, "the layout is part of the ABI");

// ---- copy_blocks, transfer_blocks, gather_blocks, scatter_blocks

enum : pc_int32 {
  PC_MOVE_THREADS = 128,
  PC_MOVE_SHARED_BYTES = PC_MOVE_THREADS / 32 * 8,  // of sum_over_block: one 64-bit sum for each warp
  PC_MAX_MOVE_AXES = 8,
  PC_MAX_ARRAYS = 112,  // of a launch
  PC_MAX_PAIRS = 128,
};

// Strides of moves count bytes.
struct PcMoveAxis {
  pc_int64 source_stride;
  pc_int64 target_stride;
  PcDivisor size;
  pc_int32 pad;
};

// The units of a block, or of some tokens of a block, along up to 8 axes, outermost first. Units are numbered with the
// last axis fastest.
struct PcMoveShape {
  PcMoveAxis axes[PC_MAX_MOVE_AXES];
  pc_int32 num_axes;
  pc_int32 unit;             // elements that a thread moves at once: bytes, or numbers if the move casts
  pc_int32 num_units;        // of a block; below 2^31 even with the units of one more grid
  pc_int32 units_per_token;  // of a move of tokens; these are the first axis, or the outer part of it
};

// Copies of blocks from sources to targets. All sources of a launch have the same strides, and so have all targets.
struct PcPairParams {
  PcMoveShape shape;
  pc_int64 source_block_stride;
  pc_int64 target_block_stride;
  pc_address on_device;  // pairs in device memory, int32 or int64 [num_pairs, 2] of any strides; absent: `pairs`
  pc_int64 pair_stride;  // elements
  pc_int64 column_stride;
  pc_int32 wide;  // 1: int64
  pc_int32 num_pairs;
  pc_int32 ordered;  // 1: a pair reads the result of earlier pairs; 0: pairs are independent and run in any order
  pc_int32 lowest;   // lowest valid block; pairs with blocks below it or past the arrays are skipped
  pc_int32 num_source_blocks;  // of the smallest array
  pc_int32 num_target_blocks;
  pc_int32 units_per_thread;
  pc_int32 one_cache;  // 1: sources are the targets, and a pair that copies a block onto itself is skipped
  pc_address sources[PC_MAX_ARRAYS];
  pc_address targets[PC_MAX_ARRAYS];
  pc_int32 pairs[PC_MAX_PAIRS][2];  // (source, target)
};

// Copies of tokens between paged caches and packed arrays, in which the sequences follow one another.
struct PcSequenceParams {
  PcMoveShape shape;
  pc_int64 block_stride;  // of caches
  pc_int64 token_stride;  // of packed arrays
  PcTable table;
  PcIndices rows;       // absent: sequence i is row i of the table
  PcIndices seq_lens;   // [num_sequences]
  pc_int64 num_tokens;  // of packed arrays; tokens past it are skipped
  pc_int32 num_blocks;  // of the smallest cache
  pc_int32 block_size;
  pc_int32 gathers;  // 1: caches are the sources, and a hole yields zeros; 0: the targets, and a hole is skipped
  pc_int32 lowest;   // blocks below are holes, as those past the caches
  pc_address caches[PC_MAX_ARRAYS];
  pc_address packed[PC_MAX_ARRAYS];
};

// Moves of tokens between slots of the same arrays, in order. No target is the source of a later move.
struct PcSlotParams {
  PcMoveShape shape;      // of one token
  pc_int64 block_stride;  // bytes
  pc_int64 token_stride;
  PcIndices sources;  // slots; moves with a slot outside 0 .. num_slots - 1 are skipped
  PcIndices targets;
  pc_int64 num_slots;  // of the smallest array
  PcDivisor block_size;
  pc_int32 block_shift;  // block_size == 1 << block_shift, or -1
  pc_address arrays[PC_MAX_ARRAYS];
};

static_assert(__builtin_offsetof(PcSlotParams, arrays) == 360, "the layout is part of the ABI");
static_assert(sizeof(PcMoveAxis) == 32, "the layout is part of the ABI");
static_assert(sizeof(PcMoveShape) == 272, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcPairParams, wide) == 312, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcPairParams, sources) == 344, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcPairParams, pairs) == 2136, "the layout is part of the ABI");
static_assert(sizeof(PcPairParams) == 3160, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcSequenceParams, table) == 288, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcSequenceParams, caches) == 392, "the layout is part of the ABI");
static_assert(sizeof(PcSequenceParams) == 2184, "the layout is part of the ABI");

// ---- merge_attention

// Log-sum-exp, float32 [token, head]; strides count elements.
struct PcLse {
  pc_address data;
  pc_int64 token_stride;
  pc_int64 head_stride;
};

struct PcMergeParams {
  PcRows out_a;  // [num_tokens, num_heads, dim]; out_a, out_b and out have one type, and out may be out_a or out_b
  PcRows out_b;
  PcRows out;
  PcLse lse_a;
  PcLse lse_b;
  PcLse lse;  // may be lse_a or lse_b
  PcDivisor num_heads;
  pc_int32 num_rows;       // tokens times heads; times the lanes of a row below 2^31, even with one more grid
  pc_int32 unit;           // elements that a thread moves at once: 1, 2, 4 or 8
  pc_int32 units_per_row;  // of a head
  pc_int32 lanes_shift;    // 1 << lanes_shift lanes of one warp process a row
  pc_int32 pad;
};

static_assert(sizeof(PcLse) == 24, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcMergeParams, num_heads) == 144, "the layout is part of the ABI");
static_assert(sizeof(PcMergeParams) == 176, "the layout is part of the ABI");
