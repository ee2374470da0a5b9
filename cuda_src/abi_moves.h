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
