// BlockPool against its model: every order, including calls that are refused half way through a list.
#include <limits>

#include "tests/index/native/model_pool.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

constexpr BlockId kMostBlock = std::numeric_limits<BlockId>::max();
constexpr BlockId kLeastBlock = std::numeric_limits<BlockId>::min();

class PoolLife {
 public:
  PoolLife(Random& random, BlockId num_blocks, Order order)
      : random_(random), model_(num_blocks, order), pool_(num_blocks, order) {}

  void step() {
    switch (random_.below(8)) {
      case 0:
      case 1: return allocate();
      case 2: return share();
      case 3:
      case 4: return free();
      case 5: return retire();
      case 6: return reclaim();
      default: return look();
    }
  }

  void end() {
    const BlockId freed = model_.reclaim(std::numeric_limits<int64_t>::max());
    PC_CHECK(pool_.reclaim(std::numeric_limits<int64_t>::max()) == freed, freed);
    const Exact<BlockId> rest(references());
    BlockId expected = 0;
    for (const BlockId block : rest.span()) expected += model_.drop(block);
    PC_CHECK(pool_.free(rest.span()) == expected, expected);
    same_counts(pool_, model_);
    allocate_all();
    pool_.check_invariants();
  }

 private:
  void allocate() {
    Exact<BlockId> out(static_cast<size_t>(random_.below(random_.one_in(4) ? model_.num_blocks() + 3 : 9)));
    out.fill(-7);
    const bool fits = out.size() <= static_cast<size_t>(model_.num_free());
    PC_CHECK(pool_.try_allocate(out.span()) == fits, out.size(), " of ", model_.num_free());
    for (const BlockId block : out.span()) {
      const BlockId expected = fits ? model_.take() : -7;
      PC_CHECK(block == expected, block, " was given, expected ", expected);
    }
  }

  // The remaining blocks come out in the order of the model, to the last one.
  void allocate_all() {
    Exact<BlockId> out(static_cast<size_t>(model_.num_free()));
    PC_CHECK(pool_.try_allocate(out.span()), out.size());
    for (const BlockId block : out.span()) PC_CHECK(block == model_.take(), block);
    Exact<BlockId> one(1);
    PC_CHECK(!pool_.try_allocate(one.span()), "an allocation beyond the pool succeeded");
    PC_CHECK(pool_.try_allocate({}), "an empty allocation failed");
  }

  [[nodiscard]] std::vector<BlockId> references() {
    std::vector<BlockId> held;
    for (BlockId block = 1; block < model_.num_blocks(); ++block) held.insert(held.end(), model_.holders(block), block);
    random_.shuffle(held);
    return held;
  }

  // Existing references; one time in three with an invalid entry.
  [[nodiscard]] Exact<BlockId> blocks() {
    std::vector<BlockId> list = references();
    if (!random_.one_in(5)) list.resize(std::min(list.size(), static_cast<size_t>(random_.below(9))));
    for (int64_t wrong = random_.one_in(3) ? random_.between(1, 3) : 0; wrong > 0; --wrong) {
      const auto any = static_cast<BlockId>(random_.below(model_.num_blocks()));
      const BlockId block = random_.pick({any, any, kNullBlock, -1, model_.num_blocks(), kMostBlock, kLeastBlock});
      list.insert(list.begin() + random_.between(0, static_cast<int64_t>(list.size())), block);
    }
    return Exact<BlockId>(list);
  }

  void share() {
    const Exact<BlockId> list = blocks();
    agree(
        model_, "share",
        [&](ModelPool& model) {
          for (const BlockId block : list.span()) model.share(block);
        },
        [&] { pool_.share(list.span()); });
  }

  void free() {
    const Exact<BlockId> list = blocks();
    BlockId expected = 0, freed = 0;
    const bool is_done = agree(
        model_, "free",
        [&](ModelPool& model) {
          for (const BlockId block : list.span()) expected += model.drop(block);
        },
        [&] { freed = pool_.free(list.span()); });
    PC_CHECK(!is_done || freed == expected, freed, " became free, expected ", expected);
  }

  void retire() {
    const Exact<BlockId> list = blocks();
    const int64_t step = random_.pick({int64_t{0}, int64_t{1}, int64_t{-3}, random_.between(0, 9),
                                       std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()});
    BlockId expected = 0, retired = 0;
    const bool is_done = agree(
        model_, "retire",
        [&](ModelPool& model) {
          for (const BlockId block : list.span()) expected += model.retire(block, step);
        },
        [&] { retired = pool_.retire(list.span(), step); });
    PC_CHECK(!is_done || retired == expected, retired, " were retired, expected ", expected);
  }

  void reclaim() {
    const int64_t step = random_.between(-4, 10);
    const BlockId expected = model_.reclaim(step);
    PC_CHECK(pool_.reclaim(step) == expected, expected);
  }

  void look() {
    pool_.check_invariants();
    same_counts(pool_, model_);
    const auto block = static_cast<BlockId>(random_.below(model_.num_blocks()));
    PC_CHECK(pool_.ref_count(block) == model_.holders(block), block);
    PC_REFUSES(InvalidBlock, static_cast<void>(pool_.ref_count(model_.num_blocks())));
    PC_REFUSES(InvalidBlock, static_cast<void>(pool_.ref_count(-1)));
    PC_REFUSES(InvalidBlock, static_cast<void>(pool_.ref_count(std::numeric_limits<int64_t>::max())));
  }

  Random& random_;
  ModelPool model_;
  BlockPool pool_;
};

constexpr std::initializer_list<Order> kOrders = {Order::Lifo, Order::Fifo, Order::Address};

}  // namespace

PC_TEST(pool_behaves_as_its_model) {
  rounds(150, [](Random& random) {
    for (const Order order : kOrders) {
      const auto any = static_cast<BlockId>(random.between(2, 200));
      PoolLife life(random, random.pick({any, 2, 3, 64, 65, 129}), order);
      for (int i = 0; i < 150; ++i) life.step();
      life.end();
    }
  });
}

// In address order, the bitmap of a pool gains a level at 64, 64^2 and 64^3 ids.
PC_TEST(pool_of_several_bitmap_levels_gives_every_block_once) {
  rounds(3, [](Random& random) {
    for (const Order order : kOrders) {
      const BlockId num_blocks = random.one_in(3) ? 64 * 64 * 64 + 1 : random.pick({4095, 4096, 4097});
      BlockPool pool(num_blocks, order);
      Exact<BlockId> all(static_cast<size_t>(num_blocks) - 1);
      PC_CHECK(pool.try_allocate(all.span()), num_blocks);
      for (size_t i = 0; i < all.size(); ++i) PC_CHECK(all[i] == static_cast<BlockId>(i) + 1, all[i]);
      std::vector<BlockId> shuffled = all.copy();
      random.shuffle(shuffled);
      PC_CHECK(pool.free(shuffled) == num_blocks - 1, num_blocks);
      pool.check_invariants();
      PC_CHECK(pool.try_allocate(all.span()), num_blocks);
      if (order == Order::Lifo) std::reverse(shuffled.begin(), shuffled.end());
      if (order == Order::Address) std::sort(shuffled.begin(), shuffled.end());
      PC_CHECK(all.copy() == shuffled, "the order is wrong");
    }
  });
}

PC_TEST(pool_refuses_impossible_sizes) {
  for (const int64_t size : {int64_t{1}, int64_t{0}, int64_t{-1}, int64_t{1} << 31, std::numeric_limits<int64_t>::max(),
                             std::numeric_limits<int64_t>::min()}) {
    PC_REFUSES(ShapeError, BlockPool(size, Order::Lifo));
  }
}
