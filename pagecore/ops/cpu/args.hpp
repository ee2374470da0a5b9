// Arguments of attention on the host. Plain structs: see ops/args.hpp.
#pragma once

#include <cstdint>

#include "cuda_src/abi.h"
#include "pagecore/ops/args.hpp"

namespace pagecore::cpu {

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
  PerHead sinks;
  PerHead alibi_slopes;
  PerHead key_scale;
  PerHead value_scale;
  const uint8_t* mask = nullptr;  // flat [query_len, seq_len] of every sequence in order
  int64_t mask_size = -1;         // -1: no mask
  TokenArray out;
  Lse lse;
};

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
  bool batch_invariant = false;
};

}  // namespace pagecore::cpu
