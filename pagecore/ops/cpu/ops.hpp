// The host operations: contents checked, then run on the kernels of dispatch.hpp. Nothing is written when one raises.
#pragma once

#include <cstdint>
#include <vector>

#include "pagecore/ops/cpu/args.hpp"
#include "pagecore/ops/plan.hpp"

namespace pagecore::cpu {

// How the host cuts a batch.
[[nodiscard]] PlanOptions host_plan_options(int64_t num_query_heads, int64_t num_kv_heads);

// `plan` may be null.
void attention(const AttentionArgs& args, const PlanView* plan);

void write_kv(const WriteArgs& args);

// Block source[i] onto block target[i] of each array, in order.
void copy_blocks(const std::vector<BlockArray>& arrays, const Indices& sources, const Indices& targets);

void merge(const MergeArgs& args);

}  // namespace pagecore::cpu
