// Promises P1 to P5 of the planner on random batches, and a plan that rejects a batch without changing.
#include <cstring>
#include <limits>
#include <map>

#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/plan.hpp"
#include "tests/native/harness.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

struct Batch {
  std::vector<int32_t> cu, lens;
  bool has_cu;

  explicit Batch(Random& random) : Batch(random, random.between(0, 5), 5000) {}
  Batch(Random& random, int64_t num_sequences, int64_t longest) : has_cu(random.one_in(2)) {
    cu.push_back(0);
    for (int64_t i = num_sequences; i > 0; --i) {
      const int64_t queries = has_cu ? random.pick({int64_t{0}, int64_t{1}, random.between(0, 40)}) : 1;
      cu.push_back(cu.back() + static_cast<int32_t>(queries));
      lens.push_back(
          static_cast<int32_t>(random.pick({int64_t{0}, random.between(0, 300), random.between(0, longest)})));
    }
  }
};

PlanOptions any_options(Random& random) {
  const int64_t kv_heads = random.between(1, 4);
  PlanOptions options = cpu::host_plan_options(kv_heads * random.pick({1, 4, 7, 100}), kv_heads);
  options.causal = random.one_in(2);
  options.window_left = random.one_in(2) ? random.between(0, 600) : -1;
  options.window_right = random.one_in(2) ? random.between(0, 20) : -1;
  options.batch_invariant = random.one_in(2);
  options.num_workers = random.pick({int64_t{1}, int64_t{2}, random.between(1, 300)});
  options.split_floor = random.pick({64, 512});
  if (random.one_in(2)) options.query_tile = random.between(1, 20);
  return options;
}

using Items = std::vector<PcWorkItem>;

bool attends(const PlanOptions& options, int64_t position, int64_t key) {
  if (options.causal && key > position) return false;
  if (!options.causal && options.window_right >= 0 && key > position + options.window_right) return false;
  return options.window_left < 0 || key >= position - options.window_left;
}

// P1 and P2: the attended keys of every row are covered exactly once, and nothing outside.
void covers(const PlanOptions& options, const Batch& batch, const Items& items) {
  std::map<int64_t, std::vector<std::pair<int64_t, int64_t>>> keys_of;
  for (const PcWorkItem& item : items) {
    const auto i = static_cast<size_t>(item.sequence);
    PC_CHECK(i < batch.lens.size() && item.query_count >= 1, item.sequence);
    PC_CHECK(item.query_begin >= batch.cu[i] && item.query_begin + item.query_count <= batch.cu[i + 1], "query rows");
    PC_CHECK(item.key_begin >= 0 && item.key_begin <= item.key_end && item.key_end <= batch.lens[i], "keys");
    for (int64_t row = item.query_begin; row < item.query_begin + item.query_count; ++row)
      keys_of[row].emplace_back(item.key_begin, item.key_end);
  }
  for (size_t i = 0; i < batch.lens.size(); ++i) {
    for (int64_t row = batch.cu[i]; row < batch.cu[i + 1]; ++row) {
      const auto& parts = keys_of[row];
      PC_CHECK(!parts.empty(), "row ", row, " is in no item");
      for (size_t k = 1; k < parts.size(); ++k) PC_CHECK(parts[k].first == parts[k - 1].second, "a cut loses keys");
      const int64_t position = batch.lens[i] - (batch.cu[i + 1] - row);
      for (int64_t key = 0; key < batch.lens[i]; ++key) {
        const bool is_in = key >= parts.front().first && key < parts.back().second;
        PC_CHECK(is_in || !attends(options, position, key), "row ", row, " lacks key ", key);
      }
    }
  }
}

// P3, and the numbering of partial rows.
void splits_are_sound(const PlanOptions& options, const Items& items, int64_t num_partial_rows) {
  int64_t partial = 0;
  for (size_t at = 0; at < items.size(); ++at) {
    const PcWorkItem& item = items[at];
    PC_CHECK(item.num_splits >= 1 && item.split >= 0 && item.split < item.num_splits, item.split);
    if (item.num_splits == 1) {
      PC_CHECK(item.partial == -1, item.partial);
      continue;
    }
    PC_CHECK(item.partial == partial, item.partial, " expected ", partial);
    partial += item.query_count;
    if (item.split > 0) {
      PC_CHECK(items[at - 1].split == item.split - 1 && items[at - 1].query_begin == item.query_begin, at);
      PC_CHECK(item.key_begin % options.split_floor == 0, "a cut at ", item.key_begin);
    }
  }
  PC_CHECK(partial == num_partial_rows, partial, " partial rows of ", num_partial_rows);
}

Items items_of(const PlanOptions& options, const Batch& batch, int64_t& num_partial_rows) {
  const Exact<int32_t> cu(batch.cu), lens(batch.lens);
  const PlanBatch view{batch.has_cu ? cu.data() : nullptr, lens.data(), std::ssize(batch.lens)};
  check_plan_batch(view);
  const PlanCounts counts = make_plan(options, view, nullptr, 0);
  for (const int64_t capacity : {counts.num_items, counts.num_items / 2}) {
    Exact<PcWorkItem> some(static_cast<size_t>(capacity));
    const PlanCounts again = make_plan(options, view, some.data(), capacity);
    PC_CHECK(again.num_items == counts.num_items, capacity);
    PC_CHECK(again.num_partial_rows == counts.num_partial_rows, capacity);
  }
  Exact<PcWorkItem> items(static_cast<size_t>(counts.num_items));
  PC_CHECK(make_plan(options, view, items.data(), counts.num_items).num_items == counts.num_items, "again");
  num_partial_rows = counts.num_partial_rows;
  return items.copy();
}

// P4: a sequence is planned alone as it is in the batch.
void is_invariant(PlanOptions options, const Batch& batch, const Items& items, Random& random) {
  options.num_workers = random.between(1, 50);
  size_t at = 0;
  for (size_t i = 0; i < batch.lens.size(); ++i) {
    Batch alone = batch;
    alone.cu = {0, batch.cu[i + 1] - batch.cu[i]};
    alone.lens = {batch.lens[i]};
    int64_t unused = 0;
    for (const PcWorkItem& item : items_of(options, alone, unused)) {
      const PcWorkItem& other = items[at++];
      PC_CHECK(item.query_begin + batch.cu[i] == other.query_begin && item.query_count == other.query_count, at);
      PC_CHECK(item.key_begin == other.key_begin && item.key_end == other.key_end, "item ", at, " depends on others");
    }
  }
  PC_CHECK(at == items.size(), at);
}

// P5 and its purpose: workers that claim units one by one finish close together.
void keeps_workers_busy(const PlanOptions& options, const Items& items) {
  std::vector<int64_t> loads(static_cast<size_t>(options.num_workers), 0);
  const int64_t heads = options.num_kv_heads;
  int64_t total = 0;
  for (const PcWorkItem& item : items) total += (item.key_end - item.key_begin) * heads;
  for (const PcWorkItem& item : items) {
    const int64_t keys = item.key_end - item.key_begin;
    const int64_t together = cpu::heads_per_pass(item.query_count * (options.num_query_heads / heads), heads);
    const int64_t most = std::max(total / (options.num_workers * 4), options.split_floor * together);
    PC_CHECK(keys * together <= most, keys, " keys of ", together, " heads, of at most ", most);
    for (int64_t head = 0; head < heads; head += together)
      *std::min_element(loads.begin(), loads.end()) += keys * std::min(together, heads - head);
  }
  const double mean = static_cast<double>(total) / static_cast<double>(options.num_workers);
  const double most = static_cast<double>(*std::max_element(loads.begin(), loads.end()));
  const auto floor = static_cast<double>(options.split_floor * heads);
  PC_CHECK(most <= std::max(1.25 * mean, mean + floor), "a worker has ", most, ", the mean is ", mean);
}

}  // namespace

PC_TEST(plan_keeps_workers_busy_with_ragged_batches) {
  rounds(300, [](Random& random) {
    PlanOptions options = any_options(random);
    options.batch_invariant = false;
    options.num_workers = random.between(2, 40);
    const Batch batch(random, random.between(1, 40), random.pick({600, 5000, 40000}));
    int64_t unused = 0;
    keeps_workers_busy(options, items_of(options, batch, unused));
  });
}

PC_TEST(plan_keeps_its_promises) {
  rounds(300, [](Random& random) {
    const PlanOptions options = any_options(random);
    const Batch batch(random);
    int64_t num_partial_rows = 0;
    const Items items = items_of(options, batch, num_partial_rows);
    covers(options, batch, items);
    splits_are_sound(options, items, num_partial_rows);
    if (options.batch_invariant) is_invariant(options, batch, items, random);
  });
}

PC_TEST(plan_with_too_many_partial_rows_stays_as_it_was) {
  Plan plan;
  plan.options = cpu::host_plan_options(1, 1);
  plan.options.num_workers = 4;
  const Exact<int32_t> lens(std::vector<int32_t>{3000, 5000});
  plan.replan({nullptr, lens.data(), 2});
  const PlanCounts counts = plan.counts();
  const Items before(plan.items(), plan.items() + counts.num_items);
  PC_CHECK(counts.num_partial_rows > 0, "no splits");
  plan.options.num_workers = std::numeric_limits<int32_t>::max();
  plan.options.query_tile = 1 << 10;
  // Thousands of items for each of 2^20 tiles: to visit each would take ten seconds.
  const Exact<int32_t> cu(std::vector<int32_t>{0, 1 << 30}), longest(std::vector<int32_t>{INT32_MAX});
  PC_REFUSES(ShapeError, plan.replan({cu.data(), longest.data(), 1}));
  PC_CHECK(plan.num_sequences() == 2 && plan.counts().num_items == counts.num_items &&
               plan.counts().num_partial_rows == counts.num_partial_rows,
           "the counts changed");
  PC_CHECK(std::equal(lens.data(), lens.data() + 2, plan.seq_lens()), "the lengths changed");
  for (int64_t i = 0; i <= 2; ++i) PC_CHECK(plan.cu_query_lens()[i] == i, "query offset ", i, " changed");
  for (size_t i = 0; i < before.size(); ++i) {
    PC_CHECK(std::memcmp(&before[i], plan.items() + i, sizeof before[i]) == 0, "item ", i, " changed");
  }
}

PC_TEST(plan_that_refuses_a_batch_stays_as_it_was) {
  rounds(100, [](Random& random) {
    Plan plan;
    plan.options = any_options(random);
    const Batch batch(random);
    const Exact<int32_t> cu(batch.cu), lens(batch.lens);
    plan.replan({cu.data(), lens.data(), std::ssize(batch.lens)});
    const PlanCounts counts = plan.counts();
    const Exact<int32_t> falling(std::vector<int32_t>{0, 3, 2}), late(std::vector<int32_t>{1, 2, 3});
    const Exact<int32_t> two(std::vector<int32_t>{5, 6}), negative(std::vector<int32_t>{5, -1});
    PC_REFUSES(ShapeError, plan.replan({falling.data(), two.data(), 2}));
    PC_REFUSES(ShapeError, plan.replan({late.data(), two.data(), 2}));
    PC_REFUSES(ShapeError, plan.replan({nullptr, negative.data(), 2}));
    PC_CHECK(plan.counts().num_items == counts.num_items && plan.num_sequences() == std::ssize(batch.lens), "changed");
    PC_CHECK(std::equal(lens.data(), lens.data() + lens.size(), plan.seq_lens()), "the plan's lengths changed");
    for (int64_t i = 0; i <= std::ssize(batch.lens); ++i) PC_CHECK(plan.cu_query_lens()[i] == batch.cu[i], i);
  });
}
