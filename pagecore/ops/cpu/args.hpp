// Arguments of attention on the host. Plain structs: see ops/args.hpp.
#pragma once

#include <cstdint>

#include "cuda_src/abi/types.h"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/sealed_plane.hpp"

namespace pagecore::cpu {

// Keys that each key head of each sequence reads: units of `unit` tokens (a block, or 1), [sequence, head, width].
// Absent when data is null. Without counts, a list ends before its first negative entry.
struct Selection {
  const char* data = nullptr;
  const char* counts = nullptr;  // [sequence, head]
  int64_t width = 0;
  int64_t sequence_stride = 0;
  int64_t head_stride = 0;
  int64_t counts_sequence_stride = 0;
  int64_t counts_head_stride = 0;
  int64_t unit = 1;       // tokens of an entry
  bool by_block = false;  // entries are blocks, also of one token
  bool wide = false;      // int64
  bool counts_wide = false;

  PC_FORCE_INLINE Indices list(int64_t sequence, int64_t head) const {
    return {data + sequence * sequence_stride + head * head_stride, width, wide ? 8 : 4, wide};
  }
  PC_FORCE_INLINE int64_t count(int64_t sequence, int64_t head) const {
    return Indices{counts + sequence * counts_sequence_stride + head * counts_head_stride, 1, 0, counts_wide}.at(0);
  }
};

// The new tokens of each sequence as a tree: bit i of a token's row is set if the token attends to the i-th new token
// of its sequence. Absent when bits is null.
struct Tree {
  const uint64_t* bits = nullptr;  // [num_tokens, words]
  int64_t words = 0;
  Indices positions;  // [num_tokens]; absent: the first new position plus the token's number of bits - 1
};

struct AttentionArgs {
  TokenArray query;
  Cache key;
  Cache value;
  Table table;
  Indices seq_lens;
  Indices rows;           // absent: sequence i is row i of the table
  Indices cu_query_lens;  // absent: one query for each sequence
  double scale = 1.0;
  double softcap = 0.0;  // 0: none
  bool causal = true;
  int64_t window_left = -1;  // keys before a query's own position; -1: unbounded
  int64_t window_right = -1;
  int64_t sink_tokens = 0;  // first keys that are attended to in addition to the window
  PerHead sinks;
  PerHead alibi_slopes;
  PerHead key_scale;
  PerHead value_scale;
  const uint8_t* mask = nullptr;  // flat [query_len, seq_len] of every sequence in order
  int64_t mask_size = -1;         // -1: no mask
  Selection selection;
  Tree tree;            // exclusive with the mask and the selection
  SealedBlocks sealed;  // key, value and table have the tokens after these
  TokenArray out;
  Lse lse;
};

// True for the first item of a tile whose keys are split; the tile's partial rows are merged once.
[[nodiscard]] inline bool begins_split_tile(const PcWorkItem& item) { return item.num_splits > 1 && item.split == 0; }

// A plan made earlier, with the lengths and options that it was made for.
struct PlanView {
  const PcWorkItem* items = nullptr;
  int64_t num_items = 0;
  int64_t num_partial_rows = 0;
  const int32_t* cu_query_lens = nullptr;  // [num_sequences + 1]
  const int32_t* seq_lens = nullptr;       // [num_sequences]
  int64_t num_sequences = 0;
  int64_t num_query_heads = 0;
  int64_t num_kv_heads = 0;
  bool causal = true;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t sink_tokens = 0;
  bool batch_invariant = false;
  bool tree = false;
};

}  // namespace pagecore::cpu
