#include <algorithm>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/attention/batch.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/scratch_buffer.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

// Throughput of one fast core per microsecond; see also kBytesPerUs.
constexpr double kFlopsPerUs = 100e3;       // float32, AVX-512
constexpr double kMergedFloatsPerUs = 2e3;  // of partial rows

// Keys and values of up to this many times the L2 size may still be in the L3 cache.
constexpr double kCachedL2s = 8.0;

// A unit of work that a thread claims: the heads of one pass of an item.
struct Unit {
  int32_t item;
  int32_t head_begin;
};

// Buffers that the calling thread keeps between calls, for itself and its helpers.
struct AttentionWorkspace {
  CheckedBatch batch;
  std::vector<PcWorkItem> items;
  std::vector<Unit> units;
  ScratchBuffer scratch;
  ScratchBuffer partials;
};

AttentionWorkspace& attention_workspace() {
  static thread_local AttentionWorkspace mine;
  return mine;
}

struct Estimate {
  double bytes;  // of keys and values
  double us;  // lower bound for one thread: keys and values are read once, and every query row is multiplied with them
};

// The window of a plan. Items of a selection count in the lists of selected keys, which the kernels cut to the window.
Window planned_window(const AttentionArgs& args) {
  if (args.selection.data != nullptr) return {};
  return make_window(args.causal, args.window_left, args.window_right, args.sink_tokens);
}

Estimate estimate(const AttentionArgs& args, const CheckedBatch& batch) {
  const Window window = planned_window(args);
  double keys = 0.0, products = 0.0;
  for (int64_t i = 0; i < batch.num_sequences(); ++i) {
    const int64_t length = batch.num_keys()[i], queries = batch.cu_query_lens()[i + 1] - batch.cu_query_lens()[i];
    if (queries == 0) continue;
    const KeyRange range = attended_keys(window, length - queries, length - 1, length);
    const auto attended = static_cast<double>(range.end - range.begin + sink_keys(window, length - 1, length).end);
    keys += attended;
    products += attended * static_cast<double>(queries);
  }
  const int64_t token_bytes =
      row_bytes(args.key) + scale_bytes(args.key) + row_bytes(args.value) + scale_bytes(args.value);
  const double bytes = keys * static_cast<double>(token_bytes * args.key.num_heads);
  const double flops = products * static_cast<double>(2 * (args.key.dim + args.value.dim) * args.query.num_heads);
  return {bytes, std::max(bytes / kBytesPerUs, flops / kFlopsPerUs)};
}

// Makes a plan for `num_threads` threads in the calling thread's workspace.
PlanView make_local_plan(const AttentionArgs& args, int64_t num_threads, bool batch_invariant,
                         AttentionWorkspace& work) {
  PlanOptions options = host_plan_options(args.query.num_heads, args.key.num_heads);
  const Window window = planned_window(args);
  options.causal = false;  // `window` includes causality
  options.window_left = window.left;
  options.window_right = window.right;
  options.sink_tokens = window.sinks;
  options.batch_invariant = batch_invariant;
  options.tree = args.tree.bits != nullptr;
  options.num_workers = num_threads;
  if (args.selection.data != nullptr) options.pass_rows = 0;
  const PlanBatch batch{work.batch.cu_query_lens(), work.batch.num_keys(), work.batch.num_sequences()};
  PlanCounts counts = make_plan(options, batch, work.items.data(), static_cast<int64_t>(work.items.size()));
  if (counts.num_items > static_cast<int64_t>(work.items.size())) {
    work.items.resize(static_cast<size_t>(counts.num_items));
    counts = make_plan(options, batch, work.items.data(), counts.num_items);
  }
  PlanView plan;
  plan.items = work.items.data();
  plan.num_items = counts.num_items;
  plan.num_partial_rows = counts.num_partial_rows;
  plan.batch_invariant = batch_invariant;
  return plan;
}

// Key heads of an item that are computed together. Each head has a selection of its own.
int64_t heads_together(const AttentionArgs& args, const PcWorkItem& item) {
  const int64_t heads = args.key.num_heads, group = args.query.num_heads / heads;
  return args.selection.data != nullptr ? 1 : heads_per_pass(item.query_count * group, heads);
}

void list_units(const AttentionArgs& args, const PlanView& plan, std::vector<Unit>& units) {
  const int64_t heads = args.key.num_heads;
  units.clear();
  for (int64_t i = 0; i < plan.num_items; ++i) {
    const int64_t together = heads_together(args, plan.items[i]);
    for (int64_t head = 0; head < heads; head += together)
      units.push_back({static_cast<int32_t>(i), static_cast<int32_t>(head)});
  }
}

// Scratch memory of each worker; no two workers share a page.
class WorkerScratch {
 public:
  WorkerScratch(const AttentionArgs& args, const PlanView& plan, int64_t num_workers, ScratchBuffer& buffer) {
    const int64_t heads = args.key.num_heads, group = args.query.num_heads / heads;
    int64_t measured_queries = 0, floats = padded(args.value.dim);  // merging needs this much
    for (int64_t i = 0; i < plan.num_items; ++i) {
      const int64_t queries = plan.items[i].query_count, rows = queries * group;
      if (queries == measured_queries) continue;
      measured_queries = queries;
      Scratch unused;
      floats = std::max(floats, carve(0, heads_per_pass(rows, heads), rows, args.key.dim, args.value.dim, unused));
    }
    each_ = (floats + kPage - 1) / kPage * kPage;
    data_ = buffer.reserve(each_ * num_workers);
  }
  [[nodiscard]] float* of(int64_t worker) const { return data_ + worker * each_; }

 private:
  static constexpr int64_t kPage = 4096 / sizeof(float);
  int64_t each_;
  float* data_;
};

// The kernels' view of the batch, with room for partial rows.
AttentionBatch kernel_batch(const AttentionArgs& args, const PlanView& plan, AttentionWorkspace& work) {
  AttentionBatch batch;
  batch.cu_query_lens = work.batch.cu_query_lens();
  batch.seq_lens = work.batch.seq_lens();
  batch.rows = work.batch.rows();
  batch.sealed_lens = work.batch.sealed_lens();
  batch.mask_starts = work.batch.mask_starts();
  batch.tree_positions = work.batch.tree_positions();
  batch.selected = work.batch.selected();
  batch.selected_counts = work.batch.selected_counts();
  batch.code_tables = &kCodeTables;
  batch.reads_by_pages = reads_by_pages();
  if (plan.num_partial_rows > 0) {
    const int64_t rows = plan.num_partial_rows * args.query.num_heads;
    batch.partial_out = work.partials.reserve(rows * (padded(args.value.dim) + 2));
    batch.partial_stats = batch.partial_out + rows * padded(args.value.dim);
  }
  return batch;
}

struct Call {
  const AttentionArgs& args;
  const AttentionBatch& batch;
  const PlanView& plan;
  const KernelTable& table;
  const WorkerScratch& scratch;
  int64_t num_threads;
};

void attend_units(const Call& call, const std::vector<Unit>& units) {
  const int64_t heads = call.args.key.num_heads;
  parallel_for(std::ssize(units), call.num_threads, [&](int64_t i, int64_t worker) noexcept {
    const auto [at, head] = units[static_cast<size_t>(i)];
    const PcWorkItem& item = call.plan.items[at];
    const int64_t together = heads_together(call.args, item);
    call.table.attend(call.args, call.batch, item, head, std::min(together, heads - head), call.scratch.of(worker));
  });
}

// Merges the splits of each query tile into its output.
void merge_tiles(const Call& call, std::vector<Unit>& tiles) {
  if (call.plan.num_partial_rows == 0) return;
  const double floats = static_cast<double>(call.plan.num_partial_rows * call.args.query.num_heads) *
                        static_cast<double>(padded(call.args.value.dim));
  tiles.clear();
  for (int64_t i = 0; i < call.plan.num_items; ++i) {
    if (begins_split_tile(call.plan.items[i])) tiles.push_back({static_cast<int32_t>(i), 0});
  }
  parallel_for(std::ssize(tiles), worthwhile_threads(floats / kMergedFloatsPerUs, call.num_threads),
               [&](int64_t i, int64_t worker) noexcept {
                 const PcWorkItem& item = call.plan.items[tiles[static_cast<size_t>(i)].item];
                 call.table.merge_splits(call.args, call.batch, item, call.scratch.of(worker));
               });
}

// Clears the output rows past the last query.
void clear_padding(const Call& call, int64_t begin) {
  constexpr int64_t kRowsOfUnit = 64;
  const TokenArray& out = call.args.out;
  const auto bytes = static_cast<double>((out.num_tokens - begin) * out.num_heads * out.dim * size_of(out.type));
  parallel_for((out.num_tokens - begin + kRowsOfUnit - 1) / kRowsOfUnit,
               worthwhile_threads(bytes / kBytesPerUs, call.num_threads), [&](int64_t i, int64_t) noexcept {
                 const int64_t first = begin + i * kRowsOfUnit;
                 call.table.clear(call.args, first, std::min(first + kRowsOfUnit, out.num_tokens));
               });
}

}  // namespace

void attention(const AttentionArgs& args, const PlanView* given, int64_t num_threads) {
  AttentionWorkspace& work = attention_workspace();
  const KernelTable& table = kernels();
  work.batch.check(args);
  if (given != nullptr) work.batch.check_plan(args, *given);
  const Estimate size = estimate(args, work.batch);
  const int64_t worth = worthwhile_threads(size.us, num_threads);
  // The items of a given plan count in positions. A selection is planned anew, as invariant as the given plan.
  const bool selects = args.selection.data != nullptr;
  const PlanView plan = given != nullptr && !selects
                            ? *given
                            : make_local_plan(args, worth, given != nullptr && given->batch_invariant, work);
  list_units(args, plan, work.units);
  const int64_t workers = std::clamp<int64_t>(std::ssize(work.units), 1, worth);
  AttentionBatch batch = kernel_batch(args, plan, work);
  batch.invariant = plan.batch_invariant;
  batch.from_cache = !batch.invariant && size.bytes <= kCachedL2s * static_cast<double>(l2_bytes());
  const WorkerScratch scratch(args, plan, workers, work.scratch);
  const Call call{args, batch, plan, table, scratch, workers};
  attend_units(call, work.units);
  merge_tiles(call, work.units);
  clear_padding(call, work.batch.num_queries());
}

}  // namespace pagecore::cpu
