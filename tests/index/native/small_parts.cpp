// Parts of the index at boundary sizes.
#include <algorithm>
#include <limits>
#include <set>

#include "pagecore/index/divider.hpp"
#include "pagecore/index/pools/free_list.hpp"
#include "pagecore/index/pools/id_bitmap.hpp"
#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/index/tables/changed_entries.hpp"
#include "pagecore/index/tables/pending_copies.hpp"
#include "pagecore/index/tables/step_buffers.hpp"
#include "tests/index/native/model_pool.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

constexpr int32_t kMostDividend = std::numeric_limits<int32_t>::max();

// Ids around every word and level boundary of a set of `capacity` ids.
std::vector<BlockId> edges(BlockId capacity) {
  std::set<BlockId> ids;
  for (const int64_t unit : {1, 64, 64 * 64, 64 * 64 * 64}) {
    for (const int64_t at : {int64_t{0}, unit, (capacity - 1) / unit * unit, int64_t{capacity}}) {
      for (const int64_t id : {at - 1, at, at + 1}) {
        if (id >= 0 && id < capacity) ids.insert(static_cast<BlockId>(id));
      }
    }
  }
  return {ids.begin(), ids.end()};
}

class BuffersCheck {
 public:
  BuffersCheck(StepBuffers& buffers, Random& random) : buffers_(buffers), random_(random) {}

  // Writes every entry of a step; the rest must be padding.
  void step() {
    const auto sequences = static_cast<int32_t>(random_.between(0, buffers_.max_sequences()));
    const auto tokens = static_cast<TokenCount>(sequences > 0 ? random_.between(0, buffers_.max_tokens()) : 0);
    const auto null_row = static_cast<RowId>(random_.one_in(4) ? 9 : 5);
    std::fill_n(buffers_.rows(), sequences, 77);
    std::fill_n(buffers_.query_lens(), sequences, 78);
    std::fill_n(buffers_.cu_query_lens(), sequences + 1, 79);
    std::fill_n(buffers_.seq_lens(), sequences, 80);
    std::fill_n(buffers_.positions(), tokens, 81);
    for (size_t group = 0; group < buffers_.num_groups(); ++group) fill_slots(group, tokens);
    buffers_.pad(sequences, tokens, null_row);
    buffers_.check_invariants();
    own_entries_are(sequences, tokens);
    const auto from = static_cast<TokenCount>(random_.between(0, tokens));
    const auto to = static_cast<TokenCount>(random_.between(from, tokens));
    buffers_.skip_slots(from, to);
    for (TokenCount i = 0; i < tokens; ++i) PC_CHECK(slot(0, i) == (i >= from && i < to ? kPaddingSlot : 90), i);
  }

 private:
  void fill_slots(size_t group, TokenCount tokens) {
    const auto value = static_cast<int32_t>(90 + group);
    if (buffers_.slot_type() == SlotType::Int64) {
      std::fill_n(static_cast<int64_t*>(buffers_.slots(group)), tokens, value);
    } else {
      std::fill_n(static_cast<int32_t*>(buffers_.slots(group)), tokens, value);
    }
  }
  [[nodiscard]] SlotId slot(size_t group, TokenCount i) const {
    if (buffers_.slot_type() == SlotType::Int64) return static_cast<int64_t*>(buffers_.slots(group))[i];
    return static_cast<int32_t*>(buffers_.slots(group))[i];
  }
  void own_entries_are(int32_t sequences, TokenCount tokens) const {
    for (int32_t i = 0; i < sequences; ++i) {
      PC_CHECK(buffers_.rows()[i] == 77 && buffers_.query_lens()[i] == 78 && buffers_.seq_lens()[i] == 80, i);
      PC_CHECK(buffers_.cu_query_lens()[i] == 79, i);
    }
    for (TokenCount i = 0; i < tokens; ++i) {
      PC_CHECK(buffers_.positions()[i] == 81, i);
      for (size_t group = 0; group < buffers_.num_groups(); ++group)
        PC_CHECK(slot(group, i) == static_cast<SlotId>(90 + group), i);
    }
  }

  StepBuffers& buffers_;
  Random& random_;
};

struct ModelCopy {
  BlockCopy copy;
  bool is_dropped;
};

std::vector<int64_t> flat(const std::vector<BlockCopy>& copies) {
  std::vector<int64_t> ids;
  for (const BlockCopy& copy : copies) ids.insert(ids.end(), {copy.source, copy.target});
  return ids;
}

// Model of settle() and take(): drops copies with a dead target, unless a copy that stays reads the target.
std::vector<BlockCopy> expected_copies(std::vector<ModelCopy> pending, const std::vector<bool>& is_live) {
  std::vector<BlockCopy> kept;
  std::set<BlockId> read;
  for (size_t i = pending.size(); i-- > 0;) {
    const BlockCopy copy = pending[i].copy;
    const bool is_dropped = pending[i].is_dropped || !is_live[static_cast<size_t>(copy.target)];
    if (is_dropped && !read.contains(copy.target)) continue;
    read.insert(copy.source);
    kept.insert(kept.begin(), copy);
  }
  return kept;
}

}  // namespace

PC_TEST(bitmap_returns_its_lowest_ids) {
  rounds(40, [](Random& random) {
    const auto any = static_cast<BlockId>(random.between(1, 9000));
    const BlockId capacity = random.pick({any, 1, 63, 64, 65, 4095, 4096, 4097, 64 * 64 * 64 + 1});
    IdBitmap bitmap(capacity);
    std::set<BlockId> model;
    std::vector<BlockId> some = edges(capacity);
    for (int i = 0; i < 40; ++i) some.push_back(static_cast<BlockId>(random.below(capacity)));
    for (int i = 0; i < 300; ++i) {
      const BlockId id = random.pick(some);
      if (!model.contains(id)) {
        bitmap.insert(id);
        model.insert(id);
      } else if (random.one_in(2)) {
        bitmap.erase(id);
        model.erase(id);
      } else {
        Exact<BlockId> out(static_cast<size_t>(random.pick({random.between(0, 5), random.between(0, 200)})));
        const size_t count = bitmap.take_lowest(out.span());
        PC_CHECK(count == std::min(out.size(), model.size()), count);
        for (const BlockId lowest : out.span().first(count)) {
          PC_CHECK(lowest == *model.begin(), lowest);
          model.erase(model.begin());
        }
      }
      if (random.one_in(20)) {
        const auto count = static_cast<BlockId>(random.between(0, std::min(capacity - id, 200)));
        bitmap.insert_run(id, count);
        for (BlockId k = 0; k < count; ++k) model.insert(id + k);
      }
      PC_CHECK(bitmap.is_empty() == model.empty(), model.size());
      PC_CHECK(bitmap.contains(id) == model.contains(id), id);
    }
    bitmap.check_invariants(std::ssize(model));
  });
}

PC_TEST(changed_entries_are_taken_once_and_ascending) {
  rounds(60, [](Random& random) {
    const auto size = static_cast<int32_t>(random.pick({int64_t{1}, int64_t{64}, random.between(2, 5000)}));
    ChangedEntries changed(size);
    std::set<int32_t> model;
    for (int i = 0; i < 60; ++i) {
      const auto at = static_cast<int32_t>(random.below(size));
      if (random.one_in(3)) {
        const auto count = static_cast<int32_t>(random.between(0, std::min(size - at, 700)));
        changed.mark_run(at, count);
        for (int32_t k = 0; k < count; ++k) model.insert(at + k);
      } else if (random.one_in(2)) {
        changed.mark(at);
        model.insert(at);
      } else {
        Exact<ChangedEntry> out(static_cast<size_t>(random.pick({random.below(4), random.below(1000)})));
        const size_t count = changed.take(out.span(), [i](int32_t index) { return index * 60 + i; });
        PC_CHECK(count == std::min(out.size(), model.size()), count);
        for (const ChangedEntry entry : out.span().first(count)) {
          PC_CHECK(entry.index == *model.begin() && entry.value == entry.index * 60 + i, entry.index);
          model.erase(model.begin());
        }
      }
      PC_CHECK(changed.is_empty() == model.empty(), model.size());
      changed.check_invariants();
    }
  });
}

PC_TEST(free_list_takes_ids_in_its_order) {
  rounds(60, [](Random& random) {
    for (const Order order : {Order::Lifo, Order::Fifo, Order::Address}) {
      const auto any = static_cast<BlockId>(random.between(1, 300));
      const BlockId num_ids = random.pick({1, 2, 3, 64, 65, any});
      FreeList list(num_ids, order);
      ModelPool model(num_ids, order);
      std::vector<BlockId> out;
      for (int i = 0; i < 200; ++i) {
        if (!out.empty() && random.one_in(2)) {
          const size_t at = static_cast<size_t>(random.below(std::ssize(out)));
          list.push(out[at]);
          if (random.one_in(3)) {
            list.take_back(out[at]);
            continue;
          }
          model.drop(out[at]);
          out.erase(out.begin() + static_cast<int64_t>(at));
        } else {
          Exact<BlockId> taken(static_cast<size_t>(random.between(0, std::min(list.size(), 7))));
          list.take(taken.span());
          for (const BlockId id : taken.span()) {
            const BlockId expected = model.take();
            PC_CHECK(id == expected, id, " was taken, expected ", expected);
            out.push_back(id);
          }
        }
        PC_CHECK(list.size() == model.num_free(), list.size());
        list.check_invariants();
      }
    }
  });
}

PC_TEST(pending_copies_keep_what_a_later_copy_reads) {
  rounds(200, [](Random& random) {
    const auto num_blocks = static_cast<BlockId>(random.pick({2, 3, 8, 64, 65}));
    PendingCopies pending(num_blocks);
    std::vector<ModelCopy> model;
    const auto drop = [&](BlockId target) {
      for (ModelCopy& each : model) each.is_dropped |= each.copy.target == target;
    };
    for (int i = 0; i < 60; ++i) {
      const auto block = static_cast<BlockId>(random.between(1, num_blocks - 1));
      if (random.one_in(10)) {
        std::vector<bool> is_live(static_cast<size_t>(num_blocks));
        for (size_t b = 0; b < is_live.size(); ++b) is_live[b] = !random.one_in(3);
        std::vector<BlockCopy> taken(pending.settle([&](BlockId b) { return is_live[static_cast<size_t>(b)]; }));
        pending.check_invariants();
        pending.take(taken);
        const auto expected = expected_copies(model, is_live);
        PC_CHECK(flat(taken) == flat(expected), shown(flat(taken)), " taken, expected ", shown(flat(expected)));
        PC_CHECK(pending.size() == 0, pending.size());
        model.clear();
      } else if (random.one_in(4)) {
        pending.drop(block);
        drop(block);
      } else {
        const BlockCopy copy{static_cast<BlockId>(random.between(1, num_blocks - 1)), block};
        drop(block);
        model.push_back({copy, false});
        pending.reserve(1);
        pending.add(copy);
      }
      pending.check_invariants();
    }
  });
}

PC_TEST(step_buffers_hold_the_largest_step) {
  rounds(60, [](Random& random) {
    const int64_t sequences = random.pick({0, 1, 2, 15, 16, 17}), tokens = random.pick({0, 1, 15, 16, 17, 64, 65});
    for (const SlotType type : {SlotType::Int32, SlotType::Int64}) {
      StepBuffers buffers(sequences, tokens, random.between(1, 3), type);
      buffers.check_invariants();
      PC_CHECK(reinterpret_cast<uintptr_t>(buffers.slots(0)) % 64 == 0, "slots are aligned");
      const auto* end = static_cast<const std::byte*>(buffers.slots(buffers.num_groups() - 1)) +
                        tokens * (type == SlotType::Int64 ? 8 : 4);
      const auto behind = buffers.image() + buffers.image_nbytes() - end;
      PC_CHECK(0 <= behind && behind < 64, "the image ends ", behind, " bytes after the last slot");
      BuffersCheck check(buffers, random);
      for (int i = 0; i < 12; ++i) check.step();
    }
  });
}

PC_TEST(step_buffers_refuse_impossible_sizes) {
  const auto make = [](int64_t sequences, int64_t tokens, int64_t groups) {
    StepBuffers(sequences, tokens, groups, SlotType::Int64);
  };
  for (const int64_t wrong :
       {int64_t{-1}, int64_t{1} << 31, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}) {
    PC_REFUSES(ShapeError, make(wrong, 1, 1));
    PC_REFUSES(ShapeError, make(1, wrong, 1));
    PC_REFUSES(ShapeError, make(1, 1, wrong));
  }
  PC_REFUSES(ShapeError, make(1, 1, -1));
  PC_REFUSES(ShapeError, make(1, 1, static_cast<int64_t>(kMaxGroups) + 1));
}

PC_TEST(divider_divides_as_the_processor_does) {
  rounds(2000, [](Random& random) {
    const auto any = static_cast<int32_t>(random.between(1, kMostDividend));
    const auto small = static_cast<int32_t>(random.between(1, 300));
    const int32_t divisor = random.pick({any, small, small, 1, 2, 3, kMostDividend, kMostDividend - 1, 1 << 30});
    const Divider divider(divisor);
    const auto multiple = static_cast<int32_t>(kMostDividend / divisor * int64_t{divisor});
    const auto other = static_cast<int32_t>(random.between(0, kMostDividend));
    for (const int32_t dividend :
         {0, 1, other, divisor, divisor - 1, multiple, multiple - 1, kMostDividend, kMostDividend - 1}) {
      PC_CHECK(divider.floor(dividend) == dividend / divisor, dividend, " / ", divisor);
      const auto up = static_cast<int32_t>((int64_t{dividend} + divisor - 1) / divisor);
      PC_CHECK(divider.ceil(dividend) == up, dividend, " / ", divisor, ", upwards");
      for (const int64_t wide : {int64_t{dividend}, dividend + (int64_t{1} << 31), dividend * int64_t{kMostDividend}})
        PC_CHECK(divider.floor_wide(wide) == wide / divisor, wide, " / ", divisor);
    }
  });
}

PC_TEST(zeroed_array_is_zero_and_reports_exhaustion) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{1000}, size_t{1} << 20}) {
    ZeroedArray<int64_t> array(size);
    for (size_t i = 0; i < size; ++i) PC_CHECK(array[i]++ == 0, i);
  }
  for (volatile size_t size : {size_t{1} << 45, size_t{1} << 60, std::numeric_limits<size_t>::max()}) {
    PC_REFUSES(NotEnoughMemory, ZeroedArray<int64_t>(size_t{size}));
  }
}
