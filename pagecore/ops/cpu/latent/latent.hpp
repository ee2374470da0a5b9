// The host operations of latent caches and their indexer: they check the contents of index arrays, then run the kernels
// of latent_args.hpp. An operation that raises has written nothing.
#pragma once

#include <cstdint>

#include "pagecore/ops/cpu/latent_args.hpp"
#include "pagecore/ops/cpu/moves/run_list.hpp"

namespace pagecore::cpu {

// Latent attention. `plan` may be null.
void latent_attention(const LatentArgs& args, const PlanView* plan, int64_t num_threads = 1);
// Makes the checks of latent_attention, and nothing else.
void check_latent_attention(const LatentArgs& args);

// New tokens, [token, 1, dim] each.
struct LatentWriteArgs {
  TokenArray latent;
  TokenArray rope;
  LatentCache cache;
  Indices slots;
  float factor = 1.0f;  // of E4M3: numbers are divided by it
};

// Quantises rows to their slots. Negative slots are skipped; of two tokens with one slot the later one stays.
void write_latent(const LatentWriteArgs& args, int64_t num_threads = 1);

// Quantises keys of the indexer, [token, 1, dim], to e4m3 codes with one float32 scale a token, a power of two.
struct IndexWriteArgs {
  TokenArray key;
  Cache keys;
  ScalePlane scales;
  Indices slots;
};
void write_index(const IndexWriteArgs& args, int64_t num_threads = 1);

// Numbers of latent_dim + rope_dim for each token of a batch, in rows `stride` bytes apart.
struct LatentRows {
  char* data;
  int64_t stride;
  Float type;
};
// Copies the rows of sequences to `out`, times `factor`. Null blocks become zeros.
void gather_latent(const LatentCache& cache, float factor, const PackedSequences& batch, const LatentRows& out,
                   int64_t num_threads = 1);

// Scores of the indexer for each query token over the keys of its sequence. Columns past the keys that a token sees get
// -inf.
struct IndexScoreCall {
  IndexScoreArgs args;
  Indices seq_lens;
  Indices rows;           // absent: sequence i is row i of the table
  Indices cu_query_lens;  // absent: one query for each sequence
  bool causal = true;
};
void index_scores(const IndexScoreCall& call, int64_t num_threads = 1);

// The positions of the k greatest of the first lens[i] scores of each row, best first; equal scores in ascending order,
// NaN and -inf never. Missing positions are -1.
struct TopkArgs {
  const float* scores;
  int64_t score_stride;
  int64_t num_rows;
  int64_t width;
  Indices lens;  // absent: width
  int64_t k;
  int32_t* out;  // [num_rows, k]
};
void select_topk(const TopkArgs& args, int64_t num_threads = 1);

// slots[i, j] = table[row of i, position / block_size] * block_size + position % block_size; -1 for a negative
// position.
struct SlotsArgs {
  const int32_t* positions;  // [num_tokens, width], contiguous
  int64_t num_tokens;
  int64_t width;
  Table table;
  Indices rows;
  Indices cu_query_lens;
  int64_t num_sequences;
  int64_t block_size;
  int32_t* out;
};
void slots_of(const SlotsArgs& args, int64_t num_threads = 1);

}  // namespace pagecore::cpu
