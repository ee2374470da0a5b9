#include <algorithm>
#include <new>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/batch.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"

namespace pagecore::cpu {
namespace {

// Aligned working memory that grows and never shrinks.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { release(); }

  [[nodiscard]] float* at_least(int64_t floats) {
    if (floats > capacity_) {
      release();
      data_ = static_cast<float*>(::operator new(static_cast<size_t>(floats) * sizeof(float), kAlignment));
      capacity_ = floats;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void release() noexcept {
    if (data_ != nullptr) ::operator delete(data_, kAlignment);
    data_ = nullptr;
    capacity_ = 0;
  }

  float* data_ = nullptr;
  int64_t capacity_ = 0;
};

// What a thread keeps between calls.
struct Workspace {
  CheckedBatch batch;
  std::vector<PcWorkItem> items;
  Memory scratch;
  Memory partials;
};

Workspace& workspace() {
  static thread_local Workspace mine;
  return mine;
}

// A plan for one worker, in the thread's own buffer.
PlanView plan_here(const AttentionArgs& args, Workspace& work) {
  PlanOptions options = host_plan_options(args.query.num_heads, args.key.num_heads);
  options.causal = args.causal;
  options.window_left = args.window_left;
  options.window_right = args.window_right;
  const PlanBatch batch{work.batch.cu_query_lens(), work.batch.seq_lens(), work.batch.num_sequences()};
  PlanCounts counts = make_plan(options, batch, work.items.data(), static_cast<int64_t>(work.items.size()));
  if (counts.num_items > static_cast<int64_t>(work.items.size())) {
    work.items.resize(static_cast<size_t>(counts.num_items));
    counts = make_plan(options, batch, work.items.data(), counts.num_items);
  }
  PlanView plan;
  plan.items = work.items.data();
  plan.num_items = counts.num_items;
  plan.num_partial_rows = counts.num_partial_rows;
  return plan;
}

float* reserve_scratch(const AttentionArgs& args, const PlanView& plan, Workspace& work) {
  const int64_t group = args.query.num_heads / args.key.num_heads;
  int64_t rows = kItemRows;  // several heads go together up to this many
  for (int64_t i = 0; i < plan.num_items; ++i) rows = std::max(rows, plan.items[i].query_count * group);
  Scratch unused;
  return work.scratch.at_least(carve(0, 1, rows, args.key.dim, args.value.dim, unused));
}

AttentionBatch reserve_partials(const AttentionArgs& args, const PlanView& plan, Workspace& work) {
  AttentionBatch batch;
  batch.cu_query_lens = work.batch.cu_query_lens();
  batch.seq_lens = work.batch.seq_lens();
  batch.rows = work.batch.rows();
  batch.mask_starts = work.batch.mask_starts();
  if (plan.num_partial_rows > 0) {
    const int64_t rows = plan.num_partial_rows * args.query.num_heads;
    batch.partial_out = work.partials.at_least(rows * (padded(args.value.dim) + 2));
    batch.partial_stats = batch.partial_out + rows * padded(args.value.dim);
  }
  return batch;
}

// One unit of work: what a thread claims.
void run_item(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item, const KernelTable& table,
              float* scratch) {
  const int64_t heads = args.key.num_heads;
  const int64_t together = heads_per_pass(item.query_count * (args.query.num_heads / heads), heads);
  for (int64_t head = 0; head < heads; head += together) {
    table.attend(args, batch, item, head, std::min(together, heads - head), scratch);
  }
}

}  // namespace

void attention(const AttentionArgs& args, const PlanView* given) {
  Workspace& work = workspace();
  const KernelTable& table = kernels();
  work.batch.check(args);
  if (given != nullptr) work.batch.check_plan(args, *given);
  const PlanView plan = given != nullptr ? *given : plan_here(args, work);
  const AttentionBatch batch = reserve_partials(args, plan, work);
  float* scratch = reserve_scratch(args, plan, work);
  for (int64_t i = 0; i < plan.num_items; ++i) run_item(args, batch, plan.items[i], table, scratch);
  for (int64_t i = 0; i < plan.num_items; ++i) {
    const PcWorkItem& item = plan.items[i];
    if (item.num_splits > 1 && item.split == 0) table.merge_splits(args, batch, item, scratch);
  }
  table.clear(args, work.batch.num_queries(), args.out.num_tokens);
}

}  // namespace pagecore::cpu
