// Parameters of the attention kernels: one struct for decode, prefill and general.
#pragma once

#include "cuda_src/abi/types.h"

// The items of each CTA of the x axis. A planner writes them, on the host or on the device. A captured graph reads the
// plan that is in this memory when the graph is launched.
struct PcSchedule {
  pc_address items;       // PcWorkItem[], at a multiple of 16
  pc_address first_item;  // int32 [num_workers + 1]: worker w has the items first_item[w] .. first_item[w + 1] - 1
};

// Keys that each key head selects. Entries of a list ascend; the keys that they cover are numbered 0, 1, 2 ..., and
// items count in these numbers.
struct PcSelection {
  pc_address entries;  // int32 or int64 [num_sequences, num_kv_heads, width]: blocks or tokens; absent: all keys
  pc_int64 sequence_stride;
  pc_int64 head_stride;
  // int32 or int64 [num_sequences, num_kv_heads]; absent: a list ends before its first negative entry.
  pc_address counts;
  pc_int64 counts_sequence_stride;
  pc_int64 counts_head_stride;
  pc_int32 width;
  pc_int32 unit;        // tokens of an entry; divides block_size
  pc_int32 unit_shift;  // unit == 1 << unit_shift, or -1
  pc_int32 wide;        // 1: int64
  pc_int32 counts_wide;
  pc_int32 pad;
};

static_assert(sizeof(PcSelection) == 72, "the layout is part of the ABI");

// The new tokens of each sequence as a tree. The mask then holds uint64 [num_tokens, words], little endian: bit i of a
// token's row is set if the token attends to the i-th new token of its sequence. Parents precede their children, so
// that the k-th set bit below a token's own is its k-th ancestor.
struct PcTree {
  PcIndices positions;  // [num_tokens]; absent: the first new position plus the token's number of bits - 1
  pc_int32 words;       // 0: there is no tree, and the mask, if there is one, has a byte for each key
  pc_int32 pad;
};

static_assert(sizeof(PcTree) == 32, "the layout is part of the ABI");

// The type of an output in float8_e4m3fn, apart from those that kernels compute with.
constexpr PcFloat PC_FLOAT8_E4M3 = static_cast<PcFloat>(3);

// Query row r of sequence i, cu[i] <= r < cu[i + 1], has the position seq_lens[i] - (cu[i + 1] - r). The packed rows of
// an item are its queries times the query heads of its key head: packed row = query * group + head of the group.
struct PcAttentionParams {
  PcRows query;  // [num_tokens, num_query_heads, head_dim]
  PcRows out;    // [num_tokens, num_query_heads, value_dim], of out_type
  PcCache key;
  PcCache value;
  PcTable table;
  PcIndices rows;           // absent: sequence i is row i of the table
  PcIndices seq_lens;       // [num_sequences]
  PcIndices cu_query_lens;  // [num_sequences + 1]; absent: one query for each sequence
  PcSchedule schedule;

  pc_address lse;  // float32 [num_tokens, num_query_heads], natural logarithm; may be absent
  pc_int64 lse_token_stride;
  pc_int64 lse_head_stride;

  // Partial rows of tiles whose keys are split: the normalised output of each split and its lse, before sinks. The last
  // CTA of a tile and head joins them, in the order of the splits.
  pc_address partial_out;  // float32 [num_partial_rows, num_query_heads, value_dim]
  pc_address partial_lse;  // float32 [num_partial_rows, num_query_heads], natural logarithm
  pc_address counters;     // int32 [num_partial_rows, num_kv_heads, head_chunks]: by a tile's first partial row; all 0
                           // before and after a launch
  pc_int64 num_partial_rows;

  pc_address sinks;         // float32 [num_query_heads]; may be absent, as may the arrays up to `mask`
  pc_address alibi_slopes;  // float32 [num_query_heads]
  pc_address key_scale;     // float32 [num_kv_heads], or one number
  pc_address value_scale;   // float32 [num_kv_heads], or one number
  pc_address query_scale;   // float32 [num_kv_heads], or one number
  pc_address out_scale;     // float32, one number: the output is divided by it
  pc_address mask;          // bytes: [query_len, seq_len] of each sequence, one after the other; or see PcTree
  pc_address mask_starts;   // int64 [num_sequences]: first byte of each sequence in the mask
  pc_int64 mask_size;       // entries

  pc_int32 num_tokens;
  pc_int32 num_sequences;
  pc_int32 num_query_heads;
  pc_int32 num_kv_heads;
  pc_int32 head_dim;
  pc_int32 value_dim;
  pc_int32 num_blocks;
  pc_int32 block_size;
  pc_int32 block_shift;   // block_size == 1 << block_shift, or -1
  pc_int32 causal;        // 1 or 0
  pc_int32 window_left;   // keys before a query's own position; -1: unbounded; below -1: chunks of -1 - window_left
  pc_int32 window_right;  // keys after it; -1: unbounded
  pc_int32 fold_tokens;  // batch-invariant: keys are summed in pieces of this length, which are joined in order; 0: off
  PcFloat query_type;
  PcFloat key_type;
  PcFloat value_type;
  float scale;
  float softcap;              // 0: none
  pc_int32 sink_tokens;       // first keys that are attended to in addition to the window; items do not cross their end
  pc_int16 key_scale_stride;  // elements: 1, or 0 if all heads have one number
  pc_int16 value_scale_stride;
  PcFloat out_type;  // query_type, or PC_FLOAT8_E4M3, whose numbers saturate
  float out_factor;  // of the output without out_scale: the inverse of its scale, or 1
  pc_int32 query_scale_stride;
  pc_int32 pad;
  PcSelection selection;
  PcTree tree;  // exclusive with the selection
};

static_assert(sizeof(PcSchedule) == 16, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcAttentionParams, lse) == 232, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcAttentionParams, num_tokens) == 360, "the layout is part of the ABI");
static_assert(sizeof(PcAttentionParams) == 560, "the layout is part of the ABI");
