// Sparse selection on the host: scores, selection, and the summaries that scores need. An operation that raises has
// written nothing.
#pragma once

#include <cstdint>

#include "pagecore/ops/cpu/select_args.hpp"

namespace pagecore::cpu {

// The batch of a call of score(); see AttentionArgs.
struct ScoreBatch {
  Indices seq_lens;
  Indices rows;
  Indices cu_query_lens;
  int64_t block_size = 1;
  bool causal = true;
};

// Scores every block or token of each query's sequence; -inf past those that are visible, and in rows of padding.
void score(const ScoreArgs& args, const ScoreBatch& batch, int64_t num_threads = 1);

// Selects positions by score, in each row by itself.
void select(const SelectArgs& args, int64_t num_threads = 1);

// Writes the summaries of new keys. The caller has checked the slots; others are skipped.
void summarise(const SummaryArgs& args, int64_t num_threads = 1);

}  // namespace pagecore::cpu
