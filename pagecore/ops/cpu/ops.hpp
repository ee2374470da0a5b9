// The host operations: contents checked, then run on the kernels of dispatch.hpp. Nothing is written when one raises.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pagecore/ops/cpu/args.hpp"
#include "pagecore/ops/cpu/kernel_table.hpp"
#include "pagecore/ops/cpu/run_list.hpp"
#include "pagecore/ops/plan.hpp"

namespace pagecore::cpu {

// How the host cuts a batch: items as large as a pass, splits where the kernels fold, several for each thread, because
// threads claim them as they come free. One worker, unless somebody says otherwise. Inline, because plans are made in
// an extension that the kernels are not linked into.
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

// `plan` may be null. num_threads: of which the call may use as many as its work is worth.
void attention(const AttentionArgs& args, const PlanView* plan, int64_t num_threads = 1);

// On at most `num_threads` threads, here and below.
void write_kv(const WriteArgs& args, int64_t num_threads = 1);

// Block source[i] onto block target[i] of each array, in order.
void copy_blocks(const std::vector<BlockArray>& arrays, const Indices& sources, const Indices& targets,
                 int64_t num_threads = 1);

// Between paged caches and packed sequences, [num_tokens, ...] with the axes of the cache beside them; `packed` i
// belongs to cache i, and they must not overlap.
void gather_blocks(const std::vector<BlockArray>& caches, const std::vector<BlockArray>& packed,
                   const PackedSequences& batch, int64_t num_threads = 1);
void scatter_blocks(const std::vector<BlockArray>& packed, const std::vector<BlockArray>& caches,
                    const PackedSequences& batch, int64_t num_threads = 1);

// Block source_ids[i] of each source onto block target_ids[i] of the target beside it, in order; sources must not
// overlap targets.
void transfer_blocks(const std::vector<BlockArray>& sources, const std::vector<BlockArray>& targets,
                     const Indices& source_ids, const Indices& target_ids, int64_t num_threads = 1);

void merge(const MergeArgs& args, int64_t num_threads = 1);

// What the above check of index arrays before anything is written, alone.
int64_t check_slots(const Indices& slots, int64_t num_tokens, const Cache& cache);  // the tokens that would be written
void check_attention(const AttentionArgs& args);  // reads args' index arrays and mask only
void check_copied(const std::vector<BlockArray>& arrays, const Indices& sources, const Indices& targets);
void check_sequences(const PackedSequences& batch);
// That pairs may be copied in any order: no block is a target twice and, with `one_cache`, none is a source and a
// target of two pairs; there, a pair that copies a block onto itself does not count.
void check_independent(const Indices& sources, const Indices& targets, bool one_cache);
void check_transferred(const std::vector<BlockArray>& sources, const std::vector<BlockArray>& targets,
                       const Indices& source_ids, const Indices& target_ids);

}  // namespace pagecore::cpu
