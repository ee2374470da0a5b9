// Parameters of attention over latent caches.
#pragma once

#include "cuda_src/abi/attention.h"
#include "cuda_src/abi/moves.h"

// Formats of the rows of a latent cache, numbered as in pagecore/ops/cpu/latent_args.hpp.
enum PcLatentFormat : pc_int32 {
  PC_LATENT_PLAIN = 0,  // float32, float16 or bfloat16
  PC_LATENT_E4M3,       // e4m3 codes; `value_factor` and `attention.scale` hold their factor
  PC_LATENT_FP8_DS,     // 512 e4m3 codes, 4 float32 scales, 64 bfloat16 rope numbers
  PC_LATENT_NVFP4_DS,   // 512 e2m1 codes, 64 e4m3 rope codes, 32 e4m3 scales
};

// Rows of the packed formats: bytes of a row, and the first byte of scales and rope.
enum : pc_int32 {
  PC_PACKED_LATENT_DIM = 512,
  PC_PACKED_ROPE_DIM = 64,
  PC_FP8_ROW_BYTES = 656,
  PC_FP8_SCALES = 512,
  PC_FP8_ROPE = 528,
  PC_NVFP4_ROW_BYTES = 352,
  PC_NVFP4_ROPE = 256,
  PC_NVFP4_SCALES = 320,  // scale s, of 16 codes, is byte 8 * (s % 4) + s / 4
};

// `attention.key` is the plane of latents and `attention.value` that of rope numbers; both may be one array, and
// strides of both count bytes. `query` holds the latent part of the queries; value_dim is the latent dim, and head_dim
// the sum of both dims. There is one key head.
//
// The grid is (row tiles, workers); counters are int32 [num_partial_rows, row tiles].
//
// With `sparse`, each query is a sequence, the table lists its slots, and block_size is 1: negative entries are
// skipped, and `block` divides a slot into a block and an offset.
struct PcLatentParams {
  PcAttentionParams attention;
  PcRows query_rope;  // [num_tokens, num_query_heads, rope_dim]
  PcDivisor block;    // tokens of a block of the cache
  PcLatentFormat format;
  pc_int32 rope_dim;
  pc_int32 sparse;  // 1 or 0
  float value_factor;
};

static_assert(__builtin_offsetof(PcLatentParams, query_rope) == 560, "the layout is part of the ABI");
static_assert(sizeof(PcLatentParams) == 616, "the layout is part of the ABI");
