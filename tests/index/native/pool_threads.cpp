// Concurrent use of one BlockPool. The owner of a block writes a cell without synchronisation: only the lock of the
// pool orders the writes of one owner before those of the next. A block with two owners at once is a data race for
// TSan, and a wrong stamp otherwise.
#include <atomic>
#include <memory>
#include <mutex>

#include "tests/index/native/model_pool.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

constexpr int kThreads = 4;
constexpr int kSteps = 1500;

// A reference that one thread passes to another; the block is no longer written.
struct Gift {
  BlockId block;
  uint64_t stamp;
};

struct Shared {
  Shared(BlockId num_blocks, Order order) : pool(num_blocks, order), cells(static_cast<size_t>(num_blocks)) {}

  BlockPool pool;
  std::vector<uint64_t> cells;  // of each block, its owner's stamp
  std::atomic<int64_t> step{0};
  std::mutex mutex;
  std::vector<Gift> mail;
};

class Worker {
 public:
  Worker(Shared& shared, uint64_t seed) : shared_(shared), random_(seed) {}

  void run() {
    for (int i = 0; i < kSteps; ++i) step();
    give(owned_.size());
    drop_guests();
  }

 private:
  void step() {
    switch (random_.below(10)) {
      case 0:
      case 1:
      case 2: return take();
      case 3:
      case 4: return give(static_cast<size_t>(random_.below(static_cast<int64_t>(owned_.size()) + 1)));
      case 5: return hand_over();
      case 6: return receive();
      case 7: return drop_guests();
      case 8: return misbehave();
      default: return look();
    }
  }

  uint64_t& cell(BlockId block) { return shared_.cells[static_cast<size_t>(block)]; }

  void take() {
    Exact<BlockId> blocks(static_cast<size_t>(random_.below(9)));
    if (!shared_.pool.try_allocate(blocks.span())) return;
    for (const BlockId block : blocks.span()) {
      cell(block) = random_.bits();
      owned_.push_back({block, cell(block)});
    }
  }

  std::vector<BlockId> pop(std::vector<Gift>& from, size_t count) {
    std::vector<BlockId> blocks;
    for (; count > 0; --count) {
      const Gift gift = from.back();
      from.pop_back();
      PC_CHECK(cell(gift.block) == gift.stamp, "block ", gift.block, " was written by another thread");
      blocks.push_back(gift.block);
    }
    return blocks;
  }

  // Frees the blocks, or retires them for a step.
  void give(size_t count) {
    const std::vector<BlockId> blocks = pop(owned_, count);
    for (const BlockId block : blocks) cell(block) = 0;
    if (random_.one_in(2)) {
      PC_CHECK(shared_.pool.free(blocks) == static_cast<BlockId>(count), count);
      return;
    }
    const int64_t now = shared_.step.fetch_add(1, std::memory_order_relaxed);
    PC_CHECK(shared_.pool.retire(blocks, now) == static_cast<BlockId>(count), count);
    shared_.pool.reclaim(now - random_.below(3));
  }

  // Adds a second, reading holder to a block; the first stops writing it and drops its reference.
  void hand_over() {
    if (owned_.empty()) return;
    const Gift gift = owned_.back();
    owned_.pop_back();
    shared_.pool.share(std::span(&gift.block, 1));
    guests_.push_back(gift);
    const std::lock_guard lock(shared_.mutex);
    shared_.mail.push_back(gift);
  }

  void receive() {
    const std::lock_guard lock(shared_.mutex);
    if (shared_.mail.empty()) return;
    guests_.push_back(shared_.mail.back());
    shared_.mail.pop_back();
  }

  void drop_guests() {
    const std::vector<BlockId> blocks = pop(guests_, guests_.size());
    const BlockId freed = random_.one_in(2) ? shared_.pool.free(blocks) : shared_.pool.retire(blocks, 0);
    PC_CHECK(freed >= 0 && freed <= static_cast<BlockId>(blocks.size()), freed);
  }

  // A list with an invalid last entry changes nothing, during concurrent calls.
  void misbehave() {
    if (owned_.empty()) return;
    const BlockId mine = owned_.back().block;
    const BlockId outside = shared_.pool.num_blocks();
    const Exact<BlockId> twice(std::vector<BlockId>{mine, mine});
    const Exact<BlockId> null(std::vector<BlockId>{mine, kNullBlock});
    const Exact<BlockId> beyond(std::vector<BlockId>{mine, outside});
    PC_REFUSES(DoubleFree, shared_.pool.free(twice.span()));
    PC_REFUSES(DoubleFree, shared_.pool.retire(twice.span(), random_.between(-1, 1)));
    PC_REFUSES(InvalidBlock, shared_.pool.free(null.span()));
    PC_REFUSES(InvalidBlock, shared_.pool.share(beyond.span()));
    PC_REFUSES(InvalidBlock, shared_.pool.retire(beyond.span(), shared_.step.load()));
    PC_CHECK(shared_.pool.ref_count(mine) == 1, mine);
  }

  void look() {
    const BlockId most = shared_.pool.num_blocks() - 1;
    for (const BlockId count : {shared_.pool.num_free(), shared_.pool.num_used(), shared_.pool.num_retired()}) {
      PC_CHECK(count >= 0 && count <= most, count);
    }
    if (random_.one_in(8)) shared_.pool.check_invariants();
    if (random_.one_in(8)) {
      Exact<int32_t> counts(static_cast<size_t>(most) + 1);
      shared_.pool.copy_ref_counts(counts.span());
      for (const Gift& gift : owned_) PC_CHECK(counts[static_cast<size_t>(gift.block)] == 1, gift.block);
    }
  }

  Shared& shared_;
  Random random_;
  std::vector<Gift> owned_;   // no other holder
  std::vector<Gift> guests_;  // perhaps another holder
};

void hammer(Random& random, BlockId num_blocks, Order order) {
  Shared shared(num_blocks, order);
  const std::vector<uint64_t> seeds = random.seeds(kThreads);
  in_threads(kThreads, [&](int who) { Worker(shared, seeds[static_cast<size_t>(who)]).run(); });
  for (const Gift& gift : shared.mail) shared.pool.free(std::span(&gift.block, 1));
  shared.pool.reclaim(shared.step.load());
  PC_CHECK(shared.pool.num_free() == num_blocks - 1, shared.pool.num_free(), " of ", num_blocks - 1, " came back");
  shared.pool.check_invariants();
}

}  // namespace

PC_TEST(pool_gives_a_block_to_one_of_many_threads) {
  rounds(8, [](Random& random) {
    for (const Order order : {Order::Lifo, Order::Fifo, Order::Address}) {
      hammer(random, static_cast<BlockId>(random.pick({9, 40, 130, 5000})), order);
    }
  });
}
