// Attention on several threads: threads write disjoint memory, and the bits equal those of one thread.
#include <memory>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "tests/ops/native/floats.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

// Long enough for several threads, with splits to merge and padding to clear.
class Shared {
 public:
  explicit Shared(Random& random) : random_(random) {
    int32_t queries = 0;
    std::vector<std::vector<int64_t>> blocks;
    int64_t num_blocks = 1;
    for (const int32_t length : {0, 700, 1, 2100, static_cast<int32_t>(random.between(1, 1500))}) {
      lens_.push_back(length);
      cu_.push_back(queries);
      queries += random.pick({1, 1, 2, 40});
      std::vector<int64_t>& row = blocks.emplace_back();
      for (int64_t i = 0; i < kWidth; ++i) row.push_back(i * kBlockSize < length ? num_blocks++ : -1);
    }
    cu_.push_back(queries);
    num_tokens_ = queries + random.pick({0, 300});
    type_ = random.pick({Float::F32, Float::BF16});
    query_ = numbers(type_, {num_tokens_, kHeads, kDim});
    key_ = numbers(Float::BF16, {num_blocks, kBlockSize, kKvHeads, kDim});
    value_ = numbers(type_, {num_blocks, kBlockSize, kKvHeads, kDim});
    table_ = std::make_unique<IdTable>(random, blocks, kWidth);
  }

  void has_the_bits_of_one_thread() {
    Plan plan;
    plan.options = host_plan_options(kHeads, kKvHeads);
    plan.options.num_workers = random_.between(1, 6);
    plan.options.batch_invariant = random_.one_in(2);
    plan.replan({cu_.data(), lens_.data(), std::ssize(lens_)});
    const std::vector<char> expected = run(plan, 1);
    for (const int64_t num_threads : {2, 3, 7}) PC_CHECK(run(plan, num_threads) == expected, num_threads, " threads");
  }

 private:
  static constexpr int64_t kBlockSize = 16, kKvHeads = 3, kHeads = 6, kDim = 64;
  static constexpr int64_t kWidth = 2100 / kBlockSize + 1;

  std::unique_ptr<Array> numbers(Float type, std::vector<int64_t> shape) {
    auto array = std::make_unique<Array>(random_, std::move(shape), size_of(type));
    for_each_index(array->shape(), [&](const auto& at) { narrow(type, random_.unit() - 0.5, array->at(at)); });
    return array;
  }

  std::vector<char> run(const Plan& plan, int64_t num_threads) {
    const ArrayStyle dense{true, false, false};
    Random same(1);
    const Array out(same, {num_tokens_, kHeads, kDim}, size_of(type_), dense),
        lse(same, {num_tokens_, kHeads}, 4, dense);
    AttentionArgs args;
    args.query = as_rows(*query_, type_);
    args.key = as_cache(*key_, Float::BF16);
    args.value = as_cache(*value_, type_);
    args.out = as_rows(out, type_);
    args.lse = as_lse(lse);
    args.scale = 0.3;
    args.table = table_->table();
    args.seq_lens = {reinterpret_cast<const char*>(lens_.data()), std::ssize(lens_), 4, false};
    args.cu_query_lens = {reinterpret_cast<const char*>(cu_.data()), std::ssize(cu_), 4, false};
    const PlanView view = view_of(plan);
    attention(args, &view, num_threads);
    std::vector<char> bytes = out.memory().copy();
    const std::vector<char> more = lse.memory().copy();
    bytes.insert(bytes.end(), more.begin(), more.end());
    return bytes;
  }

  Random& random_;
  std::vector<int32_t> lens_, cu_;
  int64_t num_tokens_;
  Float type_ = Float::F32;
  std::unique_ptr<Array> query_, key_, value_;
  std::unique_ptr<IdTable> table_;
};

}  // namespace

PC_TEST(attention_has_the_same_bits_on_any_number_of_threads) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(4, [](Random& random) { Shared(random).has_the_bits_of_one_thread(); });
  }
  set_isa("");
}

PC_TEST(attention_of_several_callers_shares_the_threads) {  // TSan looks at drivers with in_threads
  rounds(2, [](Random& random) {
    const std::vector<uint64_t> seeds = random.seeds(3);
    in_threads(3, [&](int who) {
      Random mine(seeds[static_cast<size_t>(who)]);
      Shared shared(mine);
      for (int i = 0; i < 2; ++i) shared.has_the_bits_of_one_thread();
    });
  });
}
