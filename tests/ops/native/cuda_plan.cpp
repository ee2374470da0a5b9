// Promises C1 to C3 of CUDA plans, in a buffer that ends where its layout ends.
#include <map>

#include "pagecore/ops/cuda/plan/cuda_plan.hpp"
#include "tests/native/harness.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

struct Planned {
  CudaPlanShape shape;
  PlanOptions options;
  PcPlanLayout layout;
  std::vector<int32_t> cu = {0}, lens;
  std::vector<PcWorkItem> items[PC_NUM_SECTIONS];
};

Planned any_plan(Random& random, CudaPlanner& planner) {
  Planned plan;
  plan.shape.num_kv_heads = random.between(1, 4);
  plan.shape.num_query_heads = plan.shape.num_kv_heads * random.pick({1, 3, 4, 16, 64, 71, 128, 200});
  plan.shape.batch_invariant = random.one_in(3);
  plan.shape.decode_ctas = plan.shape.prompt_ctas = random.pick({int64_t{1}, int64_t{8}, random.between(1, 300)});
  plan.options.causal = random.one_in(2);
  plan.options.window_left = random.one_in(2) ? random.between(0, 900) : -1;
  if (plan.options.window_left >= 0 && random.one_in(2)) plan.options.sink_tokens = random.between(1, 300);
  plan.options.window_right = random.one_in(2) ? random.between(0, 20) : -1;
  plan.shape.has_sinks = plan.options.sink_tokens > 0;
  if (plan.shape.has_sinks && plan.shape.batch_invariant) {
    if (plan.options.window_right < 0) plan.options.causal = true;  // the window needs a right side
    plan.shape.window_keys = plan.options.window_left + 1 + std::max<int64_t>(plan.options.window_right, 0);
  }
  const int64_t longest = random.pick({300, 5000, 200000});
  for (int64_t i = random.between(0, 12); i > 0; --i) {
    plan.cu.push_back(plan.cu.back() + static_cast<int32_t>(random.pick({int64_t{1}, random.between(0, 90)})));
    plan.lens.push_back(static_cast<int32_t>(random.pick({int64_t{0}, random.between(0, longest), longest})));
  }
  plan.shape.max_sequences = std::ssize(plan.lens) + random.pick({0, 0, 3});
  plan.shape.max_tokens = plan.cu.back() + random.pick({0, 0, 50});
  plan.layout = make_layout(plan.shape);

  const Exact<int32_t> cu(plan.cu), lens(plan.lens);
  Exact<int64_t> buffer(static_cast<size_t>(planned_bytes(plan.layout)) / 8);
  const PlanBatch batch{cu.data(), lens.data(), std::ssize(plan.lens)};
  const int64_t used = planner.plan_into(plan.layout, plan.options, batch, buffer.data());
  PC_CHECK(used <= planned_bytes(plan.layout), used);
  const char* bytes = reinterpret_cast<const char*>(buffer.data());
  const auto* items = reinterpret_cast<const PcWorkItem*>(bytes + plan.layout.items);
  int32_t end = 0;
  for (int id = 0; id < PC_NUM_SECTIONS; ++id) {
    const PcPlanSection& section = plan.layout.sections[id];
    const auto* first = reinterpret_cast<const int32_t*>(bytes + section.first_item);
    PC_CHECK(first[0] == end, first[0]);
    for (int32_t w = 0; w < section.num_workers; ++w) PC_CHECK(first[w] <= first[w + 1], w);
    end = first[section.num_workers];
    plan.items[id].assign(items + first[0], items + end);
  }
  PC_CHECK(plan.layout.items + end * static_cast<int64_t>(sizeof(PcWorkItem)) == used, used);
  return plan;
}

// C1: the keys of every row, in order, without gaps; and C2.
void covers(const Planned& plan) {
  std::map<int32_t, std::vector<PcWorkItem>> items_of;
  for (int id = 0; id < PC_NUM_SECTIONS; ++id) {
    const int32_t unit =
        plan.layout.batch_invariant != 0 ? pagecore::kFoldTokens : plan.layout.sections[id].split_floor;
    std::vector<bool> owned(static_cast<size_t>(plan.layout.num_split_rows));
    for (const PcWorkItem& item : plan.items[id]) {
      PC_CHECK(item.query_count >= 1 && item.query_count <= plan.layout.sections[id].query_tile, item.query_count);
      const int32_t first_cut = plan.options.sink_tokens > 0 ? 2 : 1;  // sinks end anywhere
      PC_CHECK(item.split < first_cut || item.key_begin % unit == 0, "a cut at ", item.key_begin);
      for (int32_t row = item.query_begin; row < item.query_begin + item.query_count; ++row) {
        items_of[row].push_back(item);
        if (item.num_splits == 1) continue;
        const auto partial = static_cast<size_t>(item.partial + row - item.query_begin);
        PC_CHECK(partial < owned.size() && !owned[partial], "partial row ", partial);
        owned[partial] = true;
      }
    }
  }
  const Window window =
      make_window(plan.options.causal, plan.options.window_left, plan.options.window_right, plan.options.sink_tokens);
  for (size_t i = 0; i < plan.lens.size(); ++i) {
    for (int32_t row = plan.cu[i]; row < plan.cu[i + 1]; ++row) {
      auto& parts = items_of[row];
      PC_CHECK(!parts.empty() && parts[0].num_splits == std::ssize(parts), "row ", row);
      std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.split < b.split; });
      for (size_t k = 0; k < parts.size(); ++k) {
        PC_CHECK(parts[k].sequence == static_cast<int32_t>(i) && parts[k].split == static_cast<int32_t>(k), k);
        const bool after_sinks = k == 1 && window.sinks > 0;
        PC_CHECK(k == 0 || after_sinks || parts[k].key_begin == parts[k - 1].key_end, "a cut loses keys");
      }
      const int64_t position = plan.lens[i] - (plan.cu[i + 1] - row);
      const KeyRange keys = attended_keys(window, position, position, plan.lens[i]);
      PC_CHECK(parts.back().key_end <= plan.lens[i] && parts[0].key_begin >= 0, "keys");
      const size_t first = window.sinks > 0 ? 1 : 0;
      PC_CHECK(keys.begin == keys.end || (parts[first].key_begin <= keys.begin && parts.back().key_end >= keys.end),
               row);
      if (first == 0) continue;
      const KeyRange sinks = sink_keys(window, position, plan.lens[i]);
      PC_CHECK(parts.size() >= 2 && parts[0].key_begin == 0 && parts[0].key_end >= sinks.end, "sinks of row ", row);
      PC_CHECK(parts[0].key_end <= parts[1].key_begin, "row ", row, " would attend to keys twice");
    }
  }
}

}  // namespace

PC_TEST(cuda_plan_keeps_its_promises) {
  CudaPlanner planner;  // reused, as in a plan that is replanned
  rounds(300, [&](Random& random) { covers(any_plan(random, planner)); });
}

PC_TEST(cuda_plan_refuses_more_than_its_layout_holds) {
  CudaPlanShape shape;
  shape.max_sequences = 2;
  shape.max_tokens = 5;
  const PcPlanLayout layout = make_layout(shape);
  Exact<int64_t> buffer(static_cast<size_t>(layout.num_bytes) / 8);
  const Exact<int32_t> lens(std::vector<int32_t>{1, 1, 1}), cu(std::vector<int32_t>{0, 3, 6});
  CudaPlanner planner;
  PC_REFUSES(ShapeError, planner.plan_into(layout, {}, {nullptr, lens.data(), 3}, buffer.data()));
  PC_REFUSES(ShapeError, planner.plan_into(layout, {}, {cu.data(), lens.data(), 2}, buffer.data()));
}
