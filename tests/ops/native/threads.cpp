// Operations called from several threads at once, on separate caches and on parts of one, while another thread changes
// the instruction set.
#include <atomic>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "tests/ops/native/floats.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

constexpr int64_t kBlockSize = 4, kHeads = 2, kDim = 20, kBlocksEach = 8;

// Thread `who` owns kBlocksEach blocks of the shared cache, from who * kBlocksEach on.
class Engine {
 public:
  Engine(const Array& key, const Array& value, int64_t who, uint64_t seed)
      : random_(seed), key_(key), value_(value), first_(who * kBlocksEach) {}

  void run() {
    for (int i = 0; i < 40; ++i) {
      write();
      const double before = attend();
      copy();
      PC_CHECK(attend() == before, "the copy of a sequence gives another result");
      gather();
    }
  }

 private:
  static constexpr int64_t kTokens = kBlocksEach / 2 * kBlockSize;

  // Writes random numbers to the first half of the blocks.
  void write() {
    const Array rows(random_, {kTokens, kHeads, kDim}, 4);
    for_each_index(rows.shape(), [&](const auto& at) { narrow(Float::F32, random_.normal(), rows.at(at)); });
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < kTokens; ++i) slots.push_back(first_ * kBlockSize + i);
    const Ids ids(random_, slots);
    WriteArgs args;
    args.key = args.value = as_rows(rows, Float::F32);
    args.key_cache = as_cache(key_, Float::BF16);
    args.value_cache = as_cache(value_, Float::F16);
    args.slots = ids.indices();
    write_kv(args);
    half_ = 0;
  }

  // Copies the used half to the other half.
  void copy() {
    std::vector<int64_t> from, to;
    for (int64_t i = 0; i < kBlocksEach / 2; ++i) {
      from.push_back(block(i));
      to.push_back(first_ + (1 - half_) * kBlocksEach / 2 + i);
    }
    const Ids sources(random_, from), targets(random_, to);
    const std::vector<BlockArray> arrays = {as_blocks(key_, 2), as_blocks(value_, 1)};
    copy_blocks(arrays, sources.indices(), targets.indices());
    half_ = 1 - half_;
  }

  double attend() {
    const Array query(random_, {1, kHeads, kDim}, 4, {true, false, false});
    const Array out(random_, {1, kHeads, kDim}, 4), lse(random_, {1, kHeads}, 4);
    for_each_index(query.shape(), [&](const auto& at) { narrow(Float::F32, 0.5, query.at(at)); });
    std::vector<int64_t> line;
    for (int64_t i = 0; i < kBlocksEach / 2; ++i) line.push_back(block(i));
    const IdTable table(random_, {line}, kBlocksEach / 2);
    const Ids lens(random_, {kTokens});
    AttentionArgs args;
    args.query = as_rows(query, Float::F32);
    args.out = as_rows(out, Float::F32);
    args.lse = as_lse(lse);
    args.key = as_cache(key_, Float::BF16);
    args.value = as_cache(value_, Float::F16);
    args.table = table.table();
    args.seq_lens = lens.indices();
    attention(args, nullptr);
    return std::round(widen(Float::F32, lse.at({0, 0})) * 1e3);  // instruction sets round differently
  }

  void gather() {
    const Array packed(random_, {kTokens, kHeads, kDim}, 4);
    std::vector<int64_t> line;
    for (int64_t i = 0; i < kBlocksEach / 2; ++i) line.push_back(block(i));
    const IdTable table(random_, {line}, kBlocksEach / 2);
    const Ids lens(random_, {kTokens});
    const PackedSequences batch{table.table(), lens.indices(), {}, kBlockSize, key_.shape(0), kTokens};
    gather_blocks({as_blocks(key_, 2)}, {as_blocks(packed, 0)}, batch);
    if (first_ > 0) scatter_blocks({as_blocks(packed, 0)}, {as_blocks(key_, 2)}, batch);
  }

  [[nodiscard]] int64_t block(int64_t i) const { return first_ + half_ * kBlocksEach / 2 + i; }

  Random random_;
  const Array& key_;
  const Array& value_;
  int64_t first_;
  int64_t half_ = 0;
};

void switch_isas(const std::atomic<int>& num_engines) {
  while (num_engines.load(std::memory_order_relaxed) > 0) {
    for (const std::string& name : available_isas()) set_isa(name);
    std::this_thread::yield();
  }
}

}  // namespace

PC_TEST(ops_of_several_threads_do_not_touch_each_other) {
  rounds(3, [](Random& random) {
    constexpr int kThreads = 4;
    const Array key(random, {kThreads * kBlocksEach, kBlockSize, kHeads, kDim}, 2);
    const Array value(random, {kThreads * kBlocksEach, kBlockSize, kHeads, kDim}, 2);
    std::atomic<int> num_engines{kThreads};
    const std::vector<uint64_t> seeds = random.seeds(kThreads);
    in_threads(kThreads + 1, [&](int who) {
      if (who == kThreads) return switch_isas(num_engines);
      Engine(key, value, who, seeds[static_cast<size_t>(who)]).run();
      --num_engines;
    });
    set_isa("");
  });
}

namespace {

// Overlapping runs of slots: the last token of a slot wins.
struct SharedWrite {
  explicit SharedWrite(Random& random) {
    while (std::ssize(slots) < kTokens) {
      const int64_t first = random.below(kNumBlocks * kSize), count = random.between(1, kSize);
      for (int64_t i = 0; i < count && std::ssize(slots) < kTokens; ++i)
        slots.push_back(random.one_in(99) ? -1 : (first + i) % (kNumBlocks * kSize));
    }
  }

  static constexpr int64_t kTokens = 700, kNumBlocks = 20, kSize = 24, kNumHeads = 2, kWidth = 256;
  std::vector<int64_t> slots;
};

// Chains of blocks, blocks that are written twice, and blocks of several sequences.
void copy_and_move(Random& random, const Array& key, const Array& value, int64_t num_threads) {
  using W = SharedWrite;
  const auto dtype = static_cast<int32_t>(key.itemsize() == 4 ? 0 : 1);
  std::vector<int64_t> from, to;
  for (int64_t i = 0; i < 3 * W::kNumBlocks; ++i) {
    from.push_back(random.between(1, W::kNumBlocks - 1));
    to.push_back(random.between(1, W::kNumBlocks - 1));
  }
  const Ids sources(random, from), targets(random, to);
  copy_blocks({as_blocks(key, dtype), as_blocks(value, dtype)}, sources.indices(), targets.indices(), num_threads);
  transfer_blocks({as_blocks(key, dtype)}, {as_blocks(value, dtype)}, sources.indices(), targets.indices(),
                  num_threads);
  const int64_t num_tokens = std::ssize(to) * W::kSize;
  const Array packed(random, {num_tokens, W::kNumHeads, W::kWidth}, 4);
  const IdTable gathered(random, {to}, std::ssize(to)), scattered(random, {from}, std::ssize(from));
  const Ids lens(random, {num_tokens});
  const auto batch = [&](const IdTable& table) {
    return PackedSequences{table.table(), lens.indices(), {}, W::kSize, W::kNumBlocks, num_tokens};
  };
  gather_blocks({as_blocks(value, dtype)}, {as_blocks(packed, 0)}, batch(gathered), num_threads);
  scatter_blocks({as_blocks(packed, 0)}, {as_blocks(key, dtype)}, batch(scattered), num_threads);
}

}  // namespace

PC_TEST(a_call_on_several_threads_leaves_what_it_leaves_on_one) {
  rounds(3, [](Random& random) {
    using W = SharedWrite;
    const SharedWrite shared(random);
    const Ids ids(random, shared.slots);
    const Array rows(random, {W::kTokens, W::kNumHeads, W::kWidth}, 4);
    for (const Float type : kFloats) {
      const uint64_t seed = random.bits();
      std::vector<std::vector<char>> results;
      for (const int64_t num_threads : {1, 2, 5}) {
        Random same(seed);
        const Array key(same, {W::kNumBlocks, W::kSize, W::kNumHeads, W::kWidth}, size_of(type));
        const Array value(same, {W::kNumBlocks, W::kSize, W::kNumHeads, W::kWidth}, size_of(type));
        WriteArgs args;
        args.key = args.value = as_rows(rows, Float::F32);
        args.key_cache = as_cache(key, type);
        args.value_cache = as_cache(value, type);
        args.slots = ids.indices();
        write_kv(args, num_threads);
        copy_and_move(same, key, value, num_threads);
        results.push_back(key.memory().copy());
        results.push_back(value.memory().copy());
      }
      for (size_t i = 2; i < results.size(); ++i) PC_CHECK(results[i] == results[i % 2], "threads changed the result");
    }
  });
}
