// What the kernels that move data are told: writes into a cache, copies between arrays, changed table entries.
#pragma once

#include "abi.h"

// Division of numbers below 2^31 by a constant: n / divisor == (n * multiplier) >> (31 + shift), in 64 bits.
struct PcDivisor {
  pc_int32 divisor;
  unsigned int multiplier;  // 2^(31 + shift) / divisor, rounded up
  pc_int32 shift;           // of the least power of two that is not below the divisor
};

static_assert(sizeof(PcDivisor) == 12, "the layout is part of the ABI");

// ---- block tables

// Element `index` of a table's memory becomes `block`.
struct PcTableEntry {
  pc_int64 index;
  pc_int32 block;
  pc_int32 pad;
};

// Entries of one batch name different elements. How many there are stands on the device, so that a graph that was
// captured once serves every step.
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

// Key or value of new tokens, and its cache.
struct PcWritePlane {
  PcRows rows;        // [num_tokens, num_heads, dim]
  PcCache cache;      // [num_blocks, block_size, num_heads, dim]
  pc_address scales;  // float32 [num_heads]: what numbers are divided by; absent: `scale` for all heads
  float scale;
  pc_int32 unit;  // elements that a thread moves at once: 1, 2, 4 or 8
  PcDivisor units_per_token;
  PcDivisor units_per_row;  // of a head, or of a token whose heads follow one another in both arrays
  pc_int32 num_units;       // of all tokens; below 2^31 with a grid's worth more
  pc_int32 pad;
};

struct PcWriteParams {
  PcWritePlane planes[2];
  PcIndices slots;     // [num_tokens]; those below 0 and from num_slots on are left out
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
