// What the attention kernels are told: one struct for decode, prompts and the general path.
#pragma once

#include "abi.h"

// Which items each CTA of the x axis works on. Written by a planner, on the host or on the device; a graph that was
// captured once reads whatever plan lies there by then.
struct PcSchedule {
  pc_address items;       // PcWorkItem[], at a multiple of 16
  pc_address first_item;  // int32 [num_workers + 1]: worker w has the items first_item[w] .. first_item[w + 1] - 1
};

// Query row r of sequence i, cu[i] <= r < cu[i + 1], stands at position seq_lens[i] - (cu[i + 1] - r). An item's rows
// are packed with the query heads of its key head, head fastest: packed row = query * group + head of the group.
struct PcAttentionParams {
  PcRows query;  // [num_tokens, num_query_heads, head_dim]
  PcRows out;    // [num_tokens, num_query_heads, value_dim], of the query's type
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

  // Of tiles whose keys are split: each split's own normalised output and its lse, before sinks. Whichever CTA of a
  // tile and head comes last joins them, in the order of the splits.
  pc_address partial_out;  // float32 [num_partial_rows, num_query_heads, value_dim]
  pc_address partial_lse;  // float32 [num_partial_rows, num_query_heads], natural logarithm
  pc_address counters;     // int32 [num_partial_rows, num_kv_heads, head_chunks]: by a tile's first partial row; all 0
                           // before a launch, and behind it again
  pc_int64 num_partial_rows;

  pc_address sinks;         // float32 [num_query_heads], here and below; may be absent
  pc_address alibi_slopes;  // [num_query_heads]
  pc_address key_scale;     // [num_kv_heads]
  pc_address value_scale;   // [num_kv_heads]
  pc_address mask;          // bytes, flat [query_len, seq_len] of every sequence in order; may be absent
  pc_address mask_starts;   // int64 [num_sequences]: where each sequence's part begins
  pc_int64 mask_size;

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
  pc_int32 window_left;   // keys before a query's own position; -1: unbounded
  pc_int32 window_right;  // behind it
  pc_int32 fold_tokens;   // batch-invariant: keys are summed in pieces of so many, then joined in order; 0: not
  PcFloat query_type;     // of query and out
  PcFloat key_type;
  PcFloat value_type;
  float scale;
  float softcap;  // 0: none
};

static_assert(sizeof(PcSchedule) == 16, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcAttentionParams, lse) == 232, "the layout is part of the ABI");
static_assert(__builtin_offsetof(PcAttentionParams, num_tokens) == 344, "the layout is part of the ABI");
static_assert(sizeof(PcAttentionParams) == 416, "the layout is part of the ABI");
