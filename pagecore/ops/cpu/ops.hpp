// The host operations: they check the contents of index arrays, then run the kernels of dispatch.hpp. An operation that
// raises has written nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pagecore/ops/cpu/args.hpp"
#include "pagecore/ops/cpu/kernel_table.hpp"
#include "pagecore/ops/cpu/moves/run_list.hpp"
#include "pagecore/ops/plan.hpp"

namespace pagecore::cpu {

// Plan options of the host: items the size of a pass, splits where the kernels fold, and several pieces per worker
// because threads claim them dynamically; for one worker unless the caller changes it. Inline, because another
// extension makes plans and does not link the kernels.
[[nodiscard]] inline PlanOptions host_plan_options(int64_t num_query_heads, int64_t num_kv_heads) {
  PlanOptions options;
  options.num_query_heads = num_query_heads;
  options.num_kv_heads = num_kv_heads;
  options.query_tile = std::max<int64_t>(1, kPromptRows / (num_query_heads / num_kv_heads));
  options.pass_rows = kPassRows;
  options.pieces_per_worker = 4;
  options.split_floor = kSplitFloor;
  options.split_granule = kFoldTokens;
  return options;
}

// Paged attention. `plan` may be null. The call uses up to `num_threads` threads, depending on its size; the other
// operations do too.
void attention(const AttentionArgs& args, const PlanView* plan, int64_t num_threads = 1);

// Writes the keys and values of new tokens to their slots.
void write_kv(const WriteArgs& args, int64_t num_threads = 1);

// Rows of numbers to codes and scales, and back.
void quantize(const Codec& codec, int64_t num_threads = 1);
void dequantize(const Codec& codec, int64_t num_threads = 1);

// Copies block sources[i] to block targets[i] of each array, in order of i.
void copy_blocks(const std::vector<BlockArray>& arrays, const Indices& sources, const Indices& targets,
                 int64_t num_threads = 1);

// Copy between paged caches and packed sequences [num_tokens, ...]. packed[i] has the inner axes of caches[i] and must
// not overlap any cache.
void gather_blocks(const std::vector<BlockArray>& caches, const std::vector<BlockArray>& packed,
                   const PackedSequences& batch, int64_t num_threads = 1);
void scatter_blocks(const std::vector<BlockArray>& packed, const std::vector<BlockArray>& caches,
                    const PackedSequences& batch, int64_t num_threads = 1);

// Copies block source_ids[i] of each source to block target_ids[i] of the target with the same index, in order of i.
// Sources must not overlap targets. Blocks below `lowest` are refused: 1 excludes the null block.
void transfer_blocks(const std::vector<BlockArray>& sources, const std::vector<BlockArray>& targets,
                     const Indices& source_ids, const Indices& target_ids, int64_t num_threads = 1, int64_t lowest = 1);

// Copies that are checked and divided among threads: running them cannot fail.
struct PlannedMoves {
  void (*move)(const Move& move, const CopyRun* runs, int64_t num_runs) = nullptr;
  std::vector<Move> moves;
  std::vector<std::vector<CopyRun>> shares;  // of the runs; each moves all planes
  int64_t num_threads = 1;

  void run() const noexcept;
};

// Plans transfer_blocks().
[[nodiscard]] PlannedMoves plan_transfer(const std::vector<BlockArray>& sources, const std::vector<BlockArray>& targets,
                                         const Indices& source_ids, const Indices& target_ids, int64_t num_threads,
                                         int64_t lowest);

// Merges two attention outputs over different keys into one.
void merge(const MergeArgs& args, int64_t num_threads = 1);

// Merges the parts of each token into one.
void merge_many(const MergeManyArgs& args, int64_t num_threads = 1);

// The checks that the operations above make before anything is written.
int64_t check_slots(const Indices& slots, int64_t num_tokens,
                    const Cache& cache);          // returns the number of tokens to write
void check_attention(const AttentionArgs& args);  // reads only the index arrays and the mask
void check_parts(const Indices& cu_parts, int64_t num_parts);
void check_copied(const std::vector<BlockArray>& arrays, const Indices& sources, const Indices& targets);
void check_sequences(const PackedSequences& batch);
// Raises unless pairs may be copied in any order: no block is the target of two pairs and, with `one_cache`, no block
// is the source of one pair and the target of another. With `one_cache`, pairs that copy a block to itself are ignored.
void check_independent(const Indices& sources, const Indices& targets, bool one_cache);
void check_transferred(const std::vector<BlockArray>& sources, const std::vector<BlockArray>& targets,
                       const Indices& source_ids, const Indices& target_ids, int64_t lowest = 1);

}  // namespace pagecore::cpu
