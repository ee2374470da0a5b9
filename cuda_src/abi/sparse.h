// Parameters of the kernels of sparse selection: summaries of keys, scores from summaries, selections.
#pragma once

#include "cuda_src/abi/moves.h"

// ---- summaries of keys: bounds of blocks, labels of tokens

struct PcSummaryParams {
  PcRows key;  // [num_tokens, num_heads, dim]; absent: the key of a token is in its slot of `stored`
  PcCache stored;
  PcCache low;  // bounds [num_blocks, num_heads, dim]; may be absent. token_stride is not used
  PcCache high;
  PcCache label;        // [num_blocks, block_size, num_heads, num_channels]; may be absent
  pc_address channels;  // int32 [num_heads, num_channels]: dims of keys; others are clamped to 0 .. dim - 1
  PcIndices slots;      // [num_tokens]; tokens with slots outside 0 .. num_slots - 1 are skipped
  pc_int64 num_slots;
  PcDivisor block_size;
  PcDivisor dim;
  PcDivisor num_channels;
  pc_int32 block_shift;  // block_size == 1 << block_shift, or -1
  pc_int32 num_heads;
  PcFloat key_type;
  PcFloat bound_type;
  PcFloat label_type;
};

static_assert(__builtin_offsetof(PcSummaryParams, channels) == 152, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcSummaryParams, block_size) == 192, "the layout is part of the ABI");
static_assert(sizeof(PcSummaryParams) == 248, "the layout is part of the ABI");

enum : pc_int32 {
  PC_SUMMARY_THREADS = 128,
  PC_SUMMARY_SHARED_BYTES = (PC_SUMMARY_THREADS + PC_SUMMARY_THREADS / 32) * 4,  // listed tokens; counts of warps
};

// ---- scores

// Entries are blocks with bounds, or tokens with labels. A block of threads scores entries of one query and key head.
struct PcScoreParams {
  PcRows query;  // [num_tokens, num_kv_heads * group, query_dim]
  PcCache low;   // [num_blocks, entries of a block, num_kv_heads, dim]; labels: absent
  PcCache high;  // bounds: 1 entry a block, token_stride is not used; labels: block_size entries
  PcTable table;
  PcIndices rows;           // absent: sequence i is row i of the table
  PcIndices seq_lens;       // [num_sequences]
  PcIndices cu_query_lens;  // [num_sequences + 1]; absent: one query for each sequence
  pc_address channels;      // labels: int32 [num_kv_heads, dim], clamped to 0 .. query_dim - 1
  pc_address scores;        // float32 [num_tokens, num_kv_heads, width]
  pc_int32 width;
  pc_int32 num_tokens;
  pc_int32 num_sequences;
  pc_int32 num_kv_heads;
  pc_int32 group;
  pc_int32 query_dim;
  pc_int32 dim;
  pc_int32 num_blocks;
  pc_int32 block_size;   // tokens of a block
  pc_int32 lanes_shift;  // 1 << lanes_shift lanes of one warp share an entry
  pc_int32 in_vectors;   // 1: 8 elements of low and high can be loaded at once
  pc_int32 causal;
  pc_int32 mean;
  PcFloat query_type;
};

static_assert(__builtin_offsetof(PcScoreParams, channels) == 192, "the layout is part of the ABI");
static_assert(sizeof(PcScoreParams) == 264, "the layout is part of the ABI");

enum : pc_int32 {
  PC_SCORE_THREADS = 128,
  PC_SCORE_ROWS = 16,      // query rows in shared memory; more are scored in several passes
  PC_SCORE_ENTRIES = 256,  // of a block of threads
  PC_MAX_SCORED_DIM = 512,
};

// Dynamic shared memory of the scores of `rows` query rows.
constexpr int pc_score_shared_bytes(int rows, int dim) {
  return (rows < PC_SCORE_ROWS ? rows : PC_SCORE_ROWS) * ((dim + 7) / 8 * 8) * 4;
}

// ---- selection

struct PcSelectParams {
  pc_address scores;  // float32 [num_rows, width]
  pc_int64 score_stride;
  pc_address positions;  // int32 [num_rows, capacity]: selected positions, then -1
  pc_address counts;     // int32 [num_rows]; may be absent
  PcIndices lens;        // one for each rows_per_length rows, clamped to 0 .. width; absent: `length`
  PcDivisor rows_per_length;
  pc_int32 length;
  pc_int32 num_rows;
  pc_int32 width;
  pc_int32 budget;     // positions selected by score
  pc_int32 sinks;      // first positions, and
  pc_int32 recent;     // last ones, that are selected in addition
  pc_int32 threshold;  // shorter rows keep all positions
  pc_int32 capacity;
  pc_int32 ranked;  // 0: positions ascend; 1: best first, with no sinks, recent and threshold
};

static_assert(__builtin_offsetof(PcSelectParams, rows_per_length) == 56, "the layout is part of the ABI");
static_assert(sizeof(PcSelectParams) == 104, "the layout is part of the ABI");

// Shared memory of a selection: bins of a digit, scratch of scans, keys; and, if ranked, pairs of key and position.
enum : pc_int32 {
  PC_SELECT_THREADS = 512,
  PC_SELECT_BINS = 2048,
  PC_SELECT_SCRATCH = 64,  // words
  PC_SELECT_HELD = 8192,   // keys
  PC_MAX_RANKED = 4096,
  PC_SELECT_SHARED_BYTES = (PC_SELECT_BINS + PC_SELECT_SCRATCH + PC_SELECT_HELD) * 4,
};

constexpr int pc_select_shared_bytes(int ranked) {
  int pairs = ranked > 0 ? 1 : 0;
  while (pairs != 0 && pairs < ranked) pairs *= 2;
  return PC_SELECT_SHARED_BYTES + pairs * 8;
}
