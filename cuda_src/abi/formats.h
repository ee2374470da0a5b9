// Stored formats of keys and values, and the parameters of the kernels that write and read them.
#pragma once

#include "cuda_src/abi/attention.h"
#include "cuda_src/abi/moves.h"

// Formats, numbered as in pagecore/ops/format.hpp.
enum PcFormat : pc_int32 {
  PC_PLAIN = 0,  // float32, float16 or bfloat16
  PC_E4M3,       // a factor for each head
  PC_E5M2,
  PC_E4M3_TOKEN,  // one float32 scale a row
  PC_I8_TOKEN,
  PC_I4_TOKEN,     // one float32 scale a row, whose 4 low bits hold the zero point
  PC_FP4_BLOCK16,  // e2m1; one UE8M0 scale for 16 numbers
  PC_NVFP4,        // e2m1; one e4m3 scale for 16 numbers, times a factor
  PC_MXFP8,        // e4m3; one UE8M0 scale for 32 numbers
};

// True for formats that store two codes a byte, the even one in the low nibble.
constexpr bool pc_is_packed(PcFormat format) {
  return format == PC_I4_TOKEN || format == PC_FP4_BLOCK16 || format == PC_NVFP4;
}
// True for formats with one float32 scale a row.
constexpr bool pc_has_row_scale(PcFormat format) {
  return format == PC_E4M3_TOKEN || format == PC_I8_TOKEN || format == PC_I4_TOKEN;
}
// Numbers that share a scale of one byte; 0 if the format has no such scales.
constexpr int pc_group_of(PcFormat format) {
  return format == PC_MXFP8 ? 32 : format == PC_FP4_BLOCK16 || format == PC_NVFP4 ? 16 : 0;
}
// Bytes of the stored scales of a row.
constexpr int pc_scale_bytes(PcFormat format, int dim) {
  if (pc_has_row_scale(format)) return 4;
  return pc_group_of(format) == 0 ? 0 : dim / pc_group_of(format);
}

// Stored scales: [block, token, head, group]. Strides count bytes; the scales of a row are contiguous.
struct PcScales {
  pc_address data;
  pc_int64 block_stride;
  pc_int64 token_stride;
  pc_int64 head_stride;
};

// Keys or values of a cache. Strides count bytes, also for PC_PLAIN.
struct PcStored {
  PcCache codes;
  PcScales scales;  // absent for PC_PLAIN, PC_E4M3 and PC_E5M2
  PcFormat format;
  PcFloat type;  // of PC_PLAIN
};

// Attention over stored formats. `attention.key` and `attention.value` are not used.
struct PcStoredAttentionParams {
  PcAttentionParams attention;
  PcStored key;
  PcStored value;
};

static_assert(sizeof(PcScales) == 32, "the layout is part of the ABI");
static_assert(sizeof(PcStored) == 72, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcStoredAttentionParams, key) == 560, "the layout is part of the ABI");
static_assert(sizeof(PcStoredAttentionParams) == 704, "the layout is part of the ABI");

// ---- write_codes

// Keys or values of new tokens, and the cache that they are written to.
struct PcCodePlane {
  PcRows rows;  // [num_tokens, num_heads, dim]
  PcStored stored;
  pc_address factors;  // float32 [num_heads] or one number: given factors; absent: `factor` for all heads
  float factor;
  pc_int32 is_4over6;  // PC_NVFP4: of the scales for a largest code of 6 and of 4, take the better
  PcDivisor num_heads;
  pc_int32 dim;
  pc_int32 num_rows;       // heads of all tokens; times the lanes of a row below 2^31, even with one more grid
  pc_int32 lanes_shift;    // 1 << lanes_shift lanes of a warp process a row
  pc_int32 in_vectors;     // 8 elements, and their codes, can be moved at once
  pc_int32 factor_stride;  // elements: 1, or 0 if all heads have one number
};

struct PcCodeParams {
  PcCodePlane planes[2];
  PcIndices slots;
  pc_int64 num_slots;
  PcDivisor block_size;
  pc_int32 block_shift;  // block_size == 1 << block_shift, or -1
};

static_assert(sizeof(PcCodePlane) == 144, "the layout is part of the ABI");
static_assert(sizeof(PcCodeParams) == 336, "the layout is part of the ABI");
