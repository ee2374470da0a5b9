// SlotAllocator against a model that works slot by slot, alone and with other threads on the same pool.
#include <algorithm>
#include <limits>
#include <memory>

#include "pagecore/index/slots/slot_allocator.hpp"
#include "tests/index/native/model_pool.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

constexpr int64_t kMostSlot = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeastSlot = std::numeric_limits<int64_t>::min();

using Sequence = std::vector<SlotId>;  // of its tokens

class SlotsLife {
 public:
  explicit SlotsLife(Random& random)
      : random_(random),
        block_size_(random.pick({1, 2, 3, 4, 16})),
        num_blocks_(static_cast<BlockId>(random.between(2, 30))),
        model_(num_blocks_, Order::Address),
        pool_(std::make_shared<BlockPool>(num_blocks_, Order::Address)),
        slots_(std::make_unique<SlotAllocator>(pool_, block_size_)) {}

  void step() {
    switch (random_.below(8)) {
      case 0:
      case 1: allocate(); break;
      case 2:
      case 3: extend(); break;
      case 4: decode(); break;
      case 5: free_some(); break;
      case 6: free_wrongly(); break;
      default: extend_wrongly(); break;
    }
    if (random_.one_in(6)) change_group();
    slots_->check_invariants();
    PC_CHECK(slots_->num_available() == int64_t{model_.num_free()} * block_size_, slots_->num_available());
  }

  // Freeing the allocator frees the blocks of an open group.
  void end() {
    slots_.reset();
    for (const BlockId block : claimed_) model_.drop(block);
    same_counts(*pool_, model_);
    pool_->check_invariants();
  }

 private:
  [[nodiscard]] int64_t num_slots() const { return num_blocks_ * block_size_; }

  // Commits the plan, or finds blocks short. `grown`: the sequences with their new lengths.
  void commit(const std::vector<Sequence*>& grown, const std::vector<int64_t>& counts, int64_t planned) {
    int64_t total = 0, needed = 0;
    for (size_t i = 0; i < grown.size(); ++i) {
      total += counts[i];
      for (int64_t k = 0; k < counts[i]; ++k) needed += (std::ssize(*grown[i]) + k) % block_size_ == 0;
    }
    PC_CHECK(planned == total, planned, " slots are planned, expected ", total);
    const bool fits = needed <= model_.num_free();
    PC_CHECK(slots_->has_room() == fits, needed, " of ", model_.num_free());
    const bool is_wide = random_.one_in(2);
    const auto size = static_cast<size_t>(total);
    Exact<int64_t> wide(is_wide ? size : 0);
    Exact<int32_t> narrow(is_wide ? 0 : size);
    wide.fill(-9);
    narrow.fill(-9);
    const SlotsOut out =
        is_wide ? SlotsOut{wide.data(), total, SlotType::Int64} : SlotsOut{narrow.data(), total, SlotType::Int32};
    if (total > 0) {
      const SlotsOut smaller{out.data, total - 1, out.type};
      PC_REFUSES(ShapeError, static_cast<void>(slots_->try_commit(smaller)));
    }
    PC_CHECK(slots_->try_commit(out) == fits, needed, " of ", model_.num_free());
    std::vector<SlotId> written = wide.copy();
    if (!is_wide) written.assign(narrow.data(), narrow.data() + size);
    if (!fits) {
      for (const SlotId slot : written) PC_CHECK(slot == -9, "a short step wrote slots");
      check_shortage(needed);
      return;
    }
    auto next = written.begin();
    for (size_t i = 0; i < grown.size(); ++i) {
      for (int64_t k = 0; k < counts[i]; ++k, ++next) {
        const bool opens = std::ssize(*grown[i]) % block_size_ == 0;
        const SlotId expected = opens ? SlotId{model_.take()} * block_size_ : grown[i]->back() + 1;
        PC_CHECK(*next == expected, "slot ", *next, ", expected ", expected);
        grown[i]->push_back(*next);
      }
    }
  }

  void check_shortage(int64_t needed) {
    try {
      slots_->fail_out_of_blocks();
    } catch (const Error& error) {
      PC_CHECK(error.kind() == ErrorKind::OutOfBlocks, error.what());
      PC_CHECK(error.requested() == std::vector<int64_t>{needed}, shown(error.requested()));
      PC_CHECK(error.available() == std::vector<int64_t>{model_.num_free()}, shown(error.available()));
    }
  }

  void allocate() {
    const int64_t count = random_.between(0, 3 * block_size_);
    sequences_.emplace_back();
    commit({&sequences_.back()}, {count}, slots_->plan_allocate(count));
    if (sequences_.back().empty()) sequences_.pop_back();
  }

  // Distinct sequences: the same last slot twice would return the slots after it twice.
  std::vector<Sequence*> some() {
    std::vector<Sequence*> named;
    for (Sequence& sequence : sequences_) named.push_back(&sequence);
    random_.shuffle(named);
    named.resize(static_cast<size_t>(random_.between(0, std::ssize(named))));
    return named;
  }

  // Arguments in memory of exact size: lengths before, lengths after, last slots.
  struct Step {
    Exact<TokenCount> prefix, length;
    Exact<SlotId> last;

    Step(const std::vector<Sequence*>& named, const std::vector<int64_t>& counts, Random& random)
        : prefix(named.size()), length(named.size()), last(named.size()) {
      for (size_t i = 0; i < named.size(); ++i) {
        const Sequence& sequence = *named[i];
        prefix[i] = static_cast<TokenCount>(sequence.size());
        length[i] = static_cast<TokenCount>(std::ssize(sequence) + counts[i]);
        last[i] = sequence.empty() ? random.pick({int64_t{-1}, kMostSlot, kLeastSlot}) : sequence.back();
      }
    }
  };

  void extend() {
    const std::vector<Sequence*> named = some();
    std::vector<int64_t> counts;
    for (size_t i = 0; i < named.size(); ++i) counts.push_back(random_.between(0, 2 * block_size_ + 1));
    const Step step(named, counts, random_);
    commit(named, counts, slots_->plan_extend(step.prefix.span(), step.length.span(), step.last.span()));
  }

  void decode() {
    const std::vector<Sequence*> named = some();
    const std::vector<int64_t> counts(named.size(), 1);
    const Step step(named, counts, random_);
    commit(named, counts, slots_->plan_decode(step.length.span(), step.last.span()));
  }

  void extend_wrongly() {
    const TokenCount size = static_cast<TokenCount>(block_size_);
    const auto refuse = [&](ErrorKind kind, TokenCount prefix, TokenCount length, SlotId last) {
      const Exact<TokenCount> prefixes(std::vector<TokenCount>{0, prefix}), lengths(std::vector<TokenCount>{1, length});
      const Exact<SlotId> lasts(std::vector<SlotId>{-1, last});
      refuses(kind, __FILE__, __LINE__, [&] { slots_->plan_extend(prefixes.span(), lengths.span(), lasts.span()); });
    };
    refuse(ErrorKind::ShapeError, 2, 1, size);
    refuse(ErrorKind::ShapeError, -1, 1, size);
    refuse(ErrorKind::ShapeError, INT32_MIN, INT32_MAX, size);
    for (const SlotId last : {int64_t{0}, block_size_ - 1, int64_t{-1}, num_slots(), kMostSlot, kLeastSlot})
      refuse(ErrorKind::InvalidBlock, size, size + 1, last);
    if (size > 1) refuse(ErrorKind::ShapeError, size, size + 1, size);
    for (const int64_t count : {int64_t{-1}, kLeastSlot}) PC_REFUSES(ShapeError, slots_->plan_allocate(count));
    const Exact<TokenCount> none(std::vector<TokenCount>{0}), two(std::vector<TokenCount>{1, 2});
    const Exact<SlotId> one(std::vector<SlotId>{-1});
    PC_REFUSES(ShapeError, slots_->plan_decode(none.span(), one.span()));
    PC_REFUSES(ShapeError, slots_->plan_decode(two.span(), one.span()));
    PC_REFUSES(ShapeError, slots_->plan_extend(two.span(), two.span(), one.span()));
    extend_what_is_free();
    // More tokens than any pool has: takes no block and overflows no sum.
    PC_CHECK(slots_->plan_allocate(kMostSlot) == kMostSlot, "planned");
    PC_CHECK(!slots_->has_room(), "has_room() is true for an impossible plan");
  }

  // Continues the partial block of a freed sequence.
  void extend_what_is_free() {
    for (BlockId block = 1; block < num_blocks_ && block_size_ > 1; ++block) {
      const auto claims = std::count(claimed_.begin(), claimed_.end(), block);
      if (model_.holders(block) > claims) continue;
      const Exact<TokenCount> length(std::vector<TokenCount>{2});
      const Exact<SlotId> last(std::vector<SlotId>{block * block_size_});
      slots_->plan_decode(length.span(), last.span());
      PC_REFUSES(DoubleFree, static_cast<void>(slots_->has_room()));
      Exact<int64_t> out(1);
      PC_REFUSES(DoubleFree, static_cast<void>(slots_->try_commit({out.data(), 1, SlotType::Int64})));
      return;
    }
  }

  void free_some() {
    Sequence all;
    BlockId expected = 0;
    for (int64_t i = random_.between(0, 3); i > 0 && !sequences_.empty(); --i) {
      std::swap(random_.pick(sequences_), sequences_.back());
      all.insert(all.end(), sequences_.back().begin(), sequences_.back().end());
      sequences_.pop_back();
    }
    for (const SlotId slot : all) {
      if (slot % block_size_ != 0) continue;
      const auto block = static_cast<BlockId>(slot / block_size_);
      if (depth_ > 0) {
        claimed_.push_back(block);
      } else {
        expected += model_.drop(block);
      }
    }
    const Exact<SlotId> list(all);
    const BlockId freed = slots_->free(list.span());
    PC_CHECK(freed == expected, freed, " became free, expected ", expected);
  }

  // A valid block followed by an invalid slot: nothing may be freed.
  void free_wrongly() {
    const auto refuse = [&](ErrorKind kind, Sequence list) {
      if (!sequences_.empty()) list.insert(list.begin(), sequences_[0][0]);
      const Exact<SlotId> slots(list);
      refuses(kind, __FILE__, __LINE__, [&] { slots_->free(slots.span()); });
    };
    for (const SlotId wrong : {int64_t{-1}, int64_t{0}, block_size_ - 1, num_slots(), kMostSlot, kLeastSlot})
      refuse(ErrorKind::InvalidBlock, {wrong});
    if (block_size_ > 2) refuse(ErrorKind::InvalidBlock, {block_size_ + 2});
    for (BlockId block = 1; block < num_blocks_; ++block) {
      const auto claims = std::count(claimed_.begin(), claimed_.end(), block);
      Sequence twice(static_cast<size_t>(model_.holders(block) - claims + 1), SlotId{block} * block_size_);
      refuse(ErrorKind::DoubleFree, twice);
    }
    same_counts(*pool_, model_);
  }

  void change_group() {
    if (depth_ == 0 || random_.one_in(3)) {
      slots_->begin_group();
      ++depth_;
      return;
    }
    BlockId expected = 0;
    if (--depth_ == 0) {
      for (const BlockId block : claimed_) expected += model_.drop(block);
      claimed_.clear();
    }
    const BlockId freed = slots_->end_group();
    PC_CHECK(freed == expected, freed, " became free, expected ", expected);
  }

  Random& random_;
  int64_t block_size_;
  BlockId num_blocks_;
  ModelPool model_;
  std::shared_ptr<BlockPool> pool_;
  std::unique_ptr<SlotAllocator> slots_;
  std::vector<Sequence> sequences_;
  std::vector<BlockId> claimed_;  // by an open group
  int64_t depth_ = 0;
};

// Each thread has its own allocator and writes a cell for each slot that it gets.
void use_slots(const std::shared_ptr<BlockPool>& pool, int64_t block_size, std::vector<uint64_t>& cells,
               uint64_t seed) {
  Random random(seed);
  SlotAllocator slots(pool, block_size);
  std::vector<Sequence> sequences;
  for (int i = 0; i < 1500; ++i) {
    const int64_t count = random.between(1, 9);
    Exact<int64_t> out(static_cast<size_t>(count));
    const SlotsOut place{out.data(), count, SlotType::Int64};
    if (random.one_in(2) || sequences.empty()) {
      slots.plan_allocate(count);
      if (!slots.try_commit(place)) continue;
      sequences.emplace_back();
    } else {
      std::swap(random.pick(sequences), sequences.back());
      const auto before = static_cast<TokenCount>(sequences.back().size());
      const auto after = static_cast<TokenCount>(before + count);
      const SlotId last = sequences.back().back();
      slots.plan_extend(std::span(&before, 1), std::span(&after, 1), std::span(&last, 1));
      if (!slots.try_commit(place)) continue;
    }
    for (const SlotId slot : out.span()) {
      sequences.back().push_back(slot);
      cells[static_cast<size_t>(slot)] = seed ^ static_cast<uint64_t>(slot);
    }
    for (const Sequence& sequence : sequences) {
      for (const SlotId slot : sequence)
        PC_CHECK(cells[static_cast<size_t>(slot)] == (seed ^ static_cast<uint64_t>(slot)), "slot ", slot, " was taken");
    }
    if (sequences.size() < 4) continue;
    slots.begin_group();
    slots.free(sequences[0]);
    slots.free(sequences[1]);
    slots.end_group();
    sequences.erase(sequences.begin(), sequences.begin() + 2);
  }
  for (const Sequence& sequence : sequences) slots.free(sequence);
}

}  // namespace

PC_TEST(slots_behave_as_their_model) {
  rounds(300, [](Random& random) {
    SlotsLife life(random);
    for (int i = 0; i < 100; ++i) life.step();
    life.end();
  });
}

PC_TEST(slot_allocators_of_several_threads_share_a_pool_and_no_slot) {
  rounds(4, [](Random& random) {
    const int64_t block_size = random.pick({1, 4, 16}), num_blocks = random.pick({20, 100});
    const auto pool = std::make_shared<BlockPool>(num_blocks, Order::Fifo);
    std::vector<uint64_t> cells(static_cast<size_t>(num_blocks * block_size));
    const std::vector<uint64_t> seeds = random.seeds(4);
    in_threads(4, [&](int who) { use_slots(pool, block_size, cells, seeds[static_cast<size_t>(who)]); });
    PC_CHECK(pool->num_free() == num_blocks - 1, pool->num_free());
    pool->check_invariants();
  });
}

PC_TEST(slot_allocator_refuses_slots_beyond_int32) {
  const auto pool = std::make_shared<BlockPool>(3, Order::Lifo);
  for (const int64_t wrong : {int64_t{0}, int64_t{-1}, int64_t{1} << 31, kMostSlot, kLeastSlot})
    PC_REFUSES(ShapeError, SlotAllocator(pool, wrong));
  SlotAllocator large(pool, std::numeric_limits<int32_t>::max());
  large.plan_allocate(1);
  Exact<int32_t> narrow(1);
  PC_REFUSES(ShapeError, static_cast<void>(large.try_commit({narrow.data(), 1, SlotType::Int32})));
  Exact<int64_t> wide(1);
  PC_CHECK(large.try_commit({wide.data(), 1, SlotType::Int64}) && wide[0] == INT32_MAX, wide[0]);
  large.free(wide.span());
}
