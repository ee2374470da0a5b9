#include "pagecore/ops/cpu/latent/latent.hpp"

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

// Products of one fast core per microsecond, with AVX-512.
constexpr double kLatentFlopsPerUs = 200e3;

// Finds a slot that a list names twice: a set of slots that is cleared by a new stamp.
class SlotSet {
 public:
  void clear(int64_t size) {
    size_t room = 64;
    while (room < 2 * static_cast<size_t>(size)) room *= 2;
    if (entries_.size() < room) entries_.assign(room, {});
    ++stamp_;
  }

  // Returns false if the slot is in the set.
  [[nodiscard]] bool add(int64_t slot) {
    const size_t mask = entries_.size() - 1;
    size_t at = static_cast<size_t>(static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15 >> 32) & mask;
    for (; entries_[at].stamp == stamp_; at = (at + 1) & mask) {
      if (entries_[at].slot == slot) return false;
    }
    entries_[at] = {slot, stamp_};
    return true;
  }

 private:
  struct Entry {
    int64_t slot = 0;
    uint64_t stamp = 0;
  };
  std::vector<Entry> entries_;
  uint64_t stamp_ = 0;
};

// Buffers that the calling thread keeps between calls, for itself and its helpers.
struct Workspace {
  CheckedBatch batch;
  SlotSet slots;
  std::vector<PcWorkItem> items;
  std::vector<int32_t> tiles;  // first items of query tiles that are split
  ScratchBuffer scratch;
  ScratchBuffer partials;
};

Workspace& workspace() {
  static thread_local Workspace mine;
  return mine;
}

void check_slots(const LatentArgs& args, Workspace& work) {
  const int64_t limit = args.cache.num_blocks * args.cache.block_size;
  for (int64_t i = 0; i < work.batch.num_sequences(); ++i) {
    const Indices list = args.call.table.row(i);
    const int64_t length = work.batch.seq_lens()[i];
    work.slots.clear(length);
    for (int64_t j = 0; j < length; ++j) {
      const int64_t slot = list.at(j);
      if (slot < 0) continue;
      PC_EXPECTS(slot < limit, InvalidBlock, "indices[", i, ", ", j, "] is ", slot, " and the cache has ", limit,
                 " slots; a negative entry is skipped");
      PC_EXPECTS(work.slots.add(slot), InvalidBlock, "indices[", i, ", ", j, "] is ", slot,
                 ", which the row lists before; name a slot once, and use -1 for an unused entry");
    }
  }
}

void check(const LatentArgs& args, const PlanView* given, Workspace& work) {
  if (args.sparse) {
    const Indices& lens = args.call.seq_lens;
    for (int64_t i = 0; i < lens.size; ++i) {
      PC_EXPECTS(lens.at(i) >= 0 && lens.at(i) <= args.call.table.width, ShapeError, "index_lens[", i, "] is ",
                 lens.at(i), "; a row of indices has ", args.call.table.width, " entries: expected 0 to ",
                 args.call.table.width);
    }
    work.batch.check_lists(args.call);
    check_slots(args, work);
  } else {
    work.batch.check(args.call);
  }
  if (given != nullptr) work.batch.check_plan(args.call, *given);
}

// Lower bound of the time of one thread: rows are read once, and every query row is multiplied with them.
double estimate_us(const LatentArgs& args, const CheckedBatch& batch) {
  const Window window = make_window(args.call.causal, args.call.window_left, args.call.window_right);
  double keys = 0.0, products = 0.0;
  for (int64_t i = 0; i < batch.num_sequences(); ++i) {
    const int64_t length = batch.seq_lens()[i], queries = batch.cu_query_lens()[i + 1] - batch.cu_query_lens()[i];
    if (queries == 0) continue;
    const KeyRange range = attended_keys(window, length - queries, length - 1, length);
    keys += static_cast<double>(range.end - range.begin);
    products += static_cast<double>(range.end - range.begin) * static_cast<double>(queries);
  }
  const double bytes = keys * static_cast<double>(latent_token_bytes(args.cache));
  const int64_t depth = 2 * args.cache.latent_dim + args.cache.rope_dim;
  const double flops = products * static_cast<double>(2 * depth * args.call.query.num_heads);
  return std::max(bytes / kBytesPerUs, flops / kLatentFlopsPerUs);
}

PlanView make_local_plan(const LatentArgs& args, int64_t num_threads, Workspace& work) {
  PlanOptions options = host_plan_options(args.call.query.num_heads, 1);
  options.causal = args.call.causal;
  options.window_left = args.call.window_left;
  options.window_right = args.call.window_right;
  options.num_workers = num_threads;
  const PlanBatch batch{work.batch.cu_query_lens(), work.batch.seq_lens(), work.batch.num_sequences()};
  PlanCounts counts = make_plan(options, batch, work.items.data(), std::ssize(work.items));
  if (counts.num_items > std::ssize(work.items)) {
    work.items.resize(static_cast<size_t>(counts.num_items));
    counts = make_plan(options, batch, work.items.data(), counts.num_items);
  }
  PlanView plan;
  plan.items = work.items.data();
  plan.num_items = counts.num_items;
  plan.num_partial_rows = counts.num_partial_rows;
  return plan;
}

void list_split_tiles(const PlanView& plan, std::vector<int32_t>& tiles) {
  tiles.clear();
  for (int64_t i = 0; i < plan.num_items; ++i) {
    if (begins_split_tile(plan.items[i])) tiles.push_back(static_cast<int32_t>(i));
  }
}

int64_t scratch_floats(const LatentArgs& args, const PlanView& plan) {
  int64_t queries = 1;
  for (int64_t i = 0; i < plan.num_items; ++i) queries = std::max<int64_t>(queries, plan.items[i].query_count);
  LatentScratch unused;
  const int64_t rows = queries * args.call.query.num_heads;
  return carve_latent(0, rows, latent_width(args.cache), latent_row_width(args.cache), unused);
}

// No two workers share a page.
int64_t page_of_floats(int64_t floats) {
  constexpr int64_t kPage = 4096 / sizeof(float);
  return (floats + kPage - 1) / kPage * kPage;
}

AttentionBatch kernel_batch(const LatentArgs& args, const PlanView& plan, Workspace& work) {
  AttentionBatch batch;
  batch.cu_query_lens = work.batch.cu_query_lens();
  batch.seq_lens = work.batch.seq_lens();
  batch.rows = work.batch.rows();
  if (plan.num_partial_rows > 0) {
    const int64_t rows = plan.num_partial_rows * args.call.query.num_heads, width = latent_width(args.cache);
    batch.partial_out = work.partials.reserve(rows * (width + 2));
    batch.partial_stats = batch.partial_out + rows * width;
  }
  batch.invariant = plan.batch_invariant;
  return batch;
}

}  // namespace

void check_latent_attention(const LatentArgs& args) { check(args, nullptr, workspace()); }

void latent_attention(const LatentArgs& args, const PlanView* given, int64_t num_threads) {
  Workspace& work = workspace();
  const KernelTable& table = kernels();
  check(args, given, work);
  const int64_t worth = worthwhile_threads(estimate_us(args, work.batch), num_threads);
  const PlanView plan = given != nullptr ? *given : make_local_plan(args, worth, work);
  const AttentionBatch batch = kernel_batch(args, plan, work);
  list_split_tiles(plan, work.tiles);
  const int64_t workers = std::clamp<int64_t>(plan.num_items, 1, worth);
  const int64_t each = page_of_floats(scratch_floats(args, plan));
  float* scratch = work.scratch.reserve(each * workers);
  parallel_for(plan.num_items, workers, [&](int64_t i, int64_t worker) noexcept {
    table.latent->attend(args, batch, plan.items[i], scratch + worker * each);
  });
  parallel_for(std::ssize(work.tiles), workers, [&](int64_t i, int64_t worker) noexcept {
    const PcWorkItem& item = plan.items[work.tiles[static_cast<size_t>(i)]];
    table.merge_splits(args.call, batch, item, scratch + worker * each);
  });
  table.clear(args.call, work.batch.num_queries(), args.call.out.num_tokens);
}

}  // namespace pagecore::cpu
