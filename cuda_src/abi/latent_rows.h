// Parameters of the kernels that write and read rows of latent caches, and of those of the sparse indexer.
#pragma once

#include "cuda_src/abi/moves.h"

// Formats of a row, numbered as in pagecore/ops/cpu/latent_args.hpp.
enum PcLatentRowFormat : pc_int32 {
  PC_LATENT_ROW_PLAIN = 0,  // float32, float16 or bfloat16
  PC_LATENT_ROW_E4M3,       // one byte a number, times a factor of the layer
  PC_LATENT_ROW_FP8,        // fp8_ds_mla, 656 bytes: 512 e4m3, 4 float32 scales, 64 bfloat16
  PC_LATENT_ROW_NVFP4,      // nvfp4_ds_mla, 352 bytes: 512 e2m1, 64 e4m3, 32 permuted e4m3 scales
};

enum : pc_int32 {
  PC_LATENT_ROW_TOKENS = 4,  // of a block of threads: each warp processes one
  PC_INDEX_E4M3 = -1,        // in place of a PcFloat: keys are e4m3 codes
  PC_INDEX_DIM = 128,        // of the keys of index_scores_matrix
  PC_INDEX_TILE = 32,        // keys that the warps of a block of index_scores_matrix process at once
};

// Rows of a cache. Strides count bytes. A format of one row for both parts has no rope address.
struct PcLatentRows {
  pc_address latent;
  pc_int64 block_stride;
  pc_int64 token_stride;
  pc_address rope;
  pc_int64 rope_block_stride;
  pc_int64 rope_token_stride;
  PcLatentRowFormat format;
  PcFloat type;  // of plain numbers
  pc_int32 latent_dim;
  pc_int32 rope_dim;
  pc_int32 latent_in_vectors;  // 8 numbers can be moved at once
  pc_int32 rope_in_vectors;
};

// New rows, [token, dim].
struct PcNewRows {
  pc_address data;
  pc_int64 token_stride;  // elements
  PcFloat type;
  pc_int32 dim;
  pc_int32 in_vectors;  // 8 elements can be moved at once
  pc_int32 pad;
};

// The slots of new tokens; tokens with slots outside 0 .. num_slots - 1 are skipped.
struct PcSlots {
  PcIndices slots;
  pc_int64 num_slots;
  PcDivisor block_size;
  pc_int32 block_shift;  // block_size == 1 << block_shift, or -1
};

struct PcLatentWriteParams {
  PcLatentRows cache;
  PcNewRows latent;
  PcNewRows rope;
  PcSlots slots;
  float factor;  // PC_LATENT_ROW_E4M3: numbers are divided by it
  pc_int32 pad;
};

// Sequences of a paged cache.
struct PcSequenceBatch {
  PcTable table;
  PcIndices rows;           // absent: sequence i is row i of the table
  PcIndices seq_lens;       // absent in a call on positions
  PcIndices cu_query_lens;  // absent: one query for each sequence
  pc_int32 num_sequences;
  pc_int32 num_blocks;  // of the cache
  PcDivisor block_size;
  pc_int32 pad;
};

struct PcLatentGatherParams {
  PcLatentRows cache;
  PcSequenceBatch batch;
  pc_address out;  // [num_tokens, latent_dim + rope_dim]
  pc_int64 out_stride;
  pc_int64 num_tokens;  // tokens past it are skipped
  float factor;
  pc_int32 out_in_vectors;
  pc_int32 lowest;  // blocks below are holes, as those past the cache
  pc_int32 pad;
};

struct PcIndexWriteParams {
  PcNewRows key;
  pc_address keys;  // e4m3 [block, token, dim]; strides count bytes
  pc_int64 block_stride;
  pc_int64 token_stride;
  pc_address scales;  // float32 [block, token]
  pc_int64 scale_block_stride;
  pc_int64 scale_token_stride;
  PcSlots slots;
  pc_int32 in_vectors;
  pc_int32 lanes_shift;  // 1 << lanes_shift lanes of a warp process a key
};

// Scores of the keys of a sequence for each of its query tokens.
struct PcIndexScoreParams {
  PcRows query;        // [token, head, dim]
  pc_address weights;  // [token, head]
  pc_int64 weight_stride;
  pc_address keys;  // [block, token, dim]; strides count bytes
  pc_int64 block_stride;
  pc_int64 token_stride;
  pc_address scales;  // float32 [block, token]; absent: 1
  pc_int64 scale_block_stride;
  pc_int64 scale_token_stride;
  PcSequenceBatch batch;
  pc_address out;  // float32 [token, width]
  pc_int64 out_stride;
  PcFloat query_type;
  PcFloat weight_type;
  pc_int32 key_type;  // a PcFloat, or PC_INDEX_E4M3
  pc_int32 num_heads;
  pc_int32 dim;
  pc_int32 num_tokens;
  pc_int32 width;
  pc_int32 keys_per_block;  // of threads
  pc_int32 causal;
  pc_int32 in_vectors;  // 4 elements of a query, and of a key, can be loaded at once
};

// Slots of positions of sequences; -1 for invalid positions.
struct PcIndexSlotParams {
  pc_address positions;  // [token, width]
  pc_int64 position_stride;
  pc_address out;  // int32 [token, width], contiguous
  PcSequenceBatch batch;
  pc_int64 num_positions;
  PcDivisor width;
  pc_int32 wide;  // 1: positions are int64
};

static_assert(sizeof(PcLatentRows) == 72, "the layout is part of the ABI");
static_assert(sizeof(PcNewRows) == 32, "the layout is part of the ABI");
static_assert(sizeof(PcSlots) == 48, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcLatentWriteParams, slots) == 136, "the layout is part of the ABI");
static_assert(sizeof(PcLatentWriteParams) == 192, "the layout is part of the ABI");
static_assert(sizeof(PcSequenceBatch) == 128, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcLatentGatherParams, out) == 200, "the layout is part of the ABI");
static_assert(sizeof(PcLatentGatherParams) == 240, "the layout is part of the ABI");
static_assert(sizeof(PcIndexWriteParams) == 136, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcIndexScoreParams, batch) == 88, "the layout is part of the ABI");
static_assert(sizeof(PcIndexScoreParams) == 272, "the layout is part of the ABI");
static_assert(sizeof(PcIndexSlotParams) == 176, "the layout is part of the ABI");
