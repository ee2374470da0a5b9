// Several tables on the same pools, each with its writer, while other threads take and free blocks.
//
// Every slot has a cell that the table with the slot writes without synchronisation: the number of a token, which
// follows from its sequence and position. Copy-on-write copies cells as an engine copies bytes. After every step the
// tokens of a row are read back: a block with two writers at once is a data race for TSan, or a wrong number.
#include <atomic>

#include "tests/index/native/model_tables.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

constexpr TokenCount kSizes[] = {4, 3};  // of the two groups
constexpr TokenCount kLargest = 4;
constexpr int kTableSteps = 1500;

struct SharedPool {
  explicit SharedPool(BlockId num_blocks)
      : pool(std::make_shared<BlockPool>(num_blocks, Order::Fifo)), cells(static_cast<size_t>(num_blocks) * kLargest) {}

  uint64_t& cell(size_t group, SlotId slot) {
    const SlotId block = slot / kSizes[group];
    return cells[static_cast<size_t>(block * kLargest + slot % kSizes[group])];
  }

  std::shared_ptr<BlockPool> pool;
  std::vector<uint64_t> cells;
};

// One writer: its tables, and the expected tokens of its rows.
class Writer {
 public:
  // Writers list the pools in different orders: the lock must sort them.
  Writer(SharedPool& a, SharedPool& b, uint64_t seed)
      : pools_{&a, &b}, random_(seed), tables_({a.pool, b.pool}, {kSizes[0], kSizes[1]}, 6, 20) {}

  void run() {
    for (int i = 0; i < kTableSteps; ++i) {
      step();
      if (i % 16 == 0) verify();
    }
    verify();
    tables_.check_invariants(false);
  }

 private:
  void step() {
    switch (random_.below(10)) {
      case 0:
      case 1: return add();
      case 2: return fork();
      case 3: return remove();
      case 4: return truncate();
      case 5: return release();
      default: return extend();
    }
  }

  void add() {
    if (tables_.num_rows() < tables_.max_sequences()) sequences_[tables_.add({})] = {};
  }

  void fork() {
    if (sequences_.empty() || tables_.num_rows() == tables_.max_sequences()) return;
    const RowId parent = any();
    const RowId row = tables_.fork(parent);
    sequences_[row] = sequences_[parent];
    holes_[row] = holes_[parent];
  }

  void remove() {
    if (sequences_.empty()) return;
    const RowId row = any();
    tables_.remove(std::span(&row, 1));
    sequences_.erase(row);
    holes_.erase(row);
  }

  void truncate() {
    if (sequences_.empty()) return;
    const RowId row = any();
    const auto length = static_cast<TokenCount>(random_.between(0, std::ssize(sequences_[row])));
    tables_.truncate(std::span(&row, 1), std::span(&length, 1), random_.one_in(2));
    sequences_[row].resize(static_cast<size_t>(length));
  }

  void release() {
    if (sequences_.empty()) return;
    const RowId row = any();
    const auto position = static_cast<TokenCount>(random_.between(0, std::ssize(sequences_[row])));
    for (int64_t group = 0; group < 2; ++group)
      tables_.release_before(std::span(&row, 1), group, std::span(&position, 1));
    holes_[row] = std::max(holes_[row], position);
  }

  void extend() {
    if (sequences_.empty()) return;
    const RowId row = any();
    const auto count =
        static_cast<TokenCount>(random_.between(0, std::min<int64_t>(7, 60 - std::ssize(sequences_[row]))));
    const auto size = static_cast<size_t>(count);
    Exact<int64_t> first(size);
    Exact<int32_t> second(size);
    const SlotsOut out[] = {{first.data(), count, SlotType::Int64}, {second.data(), count, SlotType::Int32}};
    if (!tables_.try_extend(std::span(&row, 1), std::span(&count, 1), out)) return;
    run_copies();
    if (count == 0) return;
    // The row was truncated into its holes: tokens before the new ones are gone.
    holes_[row] = std::min(holes_[row], static_cast<TokenCount>(sequences_[row].size()));
    for (size_t i = 0; i < size; ++i) {
      const uint64_t number = random_.bits();
      sequences_[row].push_back(number);
      pools_[0]->cell(0, first[i]) = number;
      pools_[1]->cell(1, second[i]) = number;
    }
  }

  void run_copies() {
    for (size_t group = 0; group < 2; ++group) {
      std::vector<BlockCopy> copies(tables_.settle_copies(static_cast<int64_t>(group)));
      tables_.take_copies(static_cast<int64_t>(group), copies);
      for (const BlockCopy copy : copies) {
        for (SlotId i = 0; i < kSizes[group]; ++i)
          pools_[group]->cell(group, copy.target * kSizes[group] + i) =
              pools_[group]->cell(group, copy.source * kSizes[group] + i);
      }
    }
  }

  void verify() {
    for (const auto& [row, tokens] : sequences_) {
      for (size_t group = 0; group < 2; ++group) verify_row(row, tokens, group);
    }
  }

  void verify_row(RowId row, const std::vector<uint64_t>& tokens, size_t group) {
    const auto blocks = tables_.blocks(row, static_cast<int64_t>(group));
    const TokenCount size = kSizes[group];
    for (TokenCount position = holes_[row]; position < std::ssize(tokens); ++position) {
      const BlockId block = blocks[static_cast<size_t>(position / size)];
      PC_CHECK(block != kNullBlock, "row ", row, " has a hole at ", position);
      const uint64_t number = pools_[group]->cell(group, SlotId{block} * size + position % size);
      PC_CHECK(number == tokens[static_cast<size_t>(position)], "row ", row, " token ", position, " of group ", group);
    }
  }

  RowId any() { return random_.pick(sequences_).first; }

  SharedPool* pools_[2];
  Random random_;
  BlockTables tables_;
  std::map<RowId, std::vector<uint64_t>> sequences_;
  std::map<RowId, TokenCount> holes_;  // earlier positions may be gone
};

// Takes, stamps and frees blocks of both pools until the writers are done.
void meddle(SharedPool& a, SharedPool& b, const std::atomic<int>& num_writers, uint64_t seed) {
  Random random(seed);
  while (num_writers.load(std::memory_order_relaxed) > 0) {
    SharedPool& shared = random.one_in(2) ? a : b;
    Exact<BlockId> blocks(static_cast<size_t>(random.between(1, 6)));
    if (!shared.pool->try_allocate(blocks.span())) continue;
    const uint64_t stamp = random.bits();
    for (const BlockId block : blocks.span()) shared.cells[static_cast<size_t>(block) * kLargest] = stamp;
    std::this_thread::yield();
    for (const BlockId block : blocks.span())
      PC_CHECK(shared.cells[static_cast<size_t>(block) * kLargest] == stamp, "block ", block);
    if (random.one_in(2)) {
      shared.pool->free(blocks.span());
    } else {
      shared.pool->retire(blocks.span(), 1);
      shared.pool->reclaim(1);
    }
  }
}

}  // namespace

PC_TEST(tables_of_several_threads_share_pools_and_no_block) {
  rounds(10, [](Random& random) {
    SharedPool a(static_cast<BlockId>(random.pick({20, 60, 200}))), b(static_cast<BlockId>(random.pick({30, 90, 200})));
    std::atomic<int> num_writers{2};
    const std::vector<uint64_t> seeds = random.seeds(3);
    {
      Writer first(a, b, seeds[0]), second(b, a, seeds[1]);
      in_threads(3, [&](int who) {
        if (who == 2) return meddle(a, b, num_writers, seeds[2]);
        (who == 0 ? first : second).run();
        --num_writers;
      });
    }
    for (const SharedPool* each : {&a, &b}) {
      each->pool->check_invariants();
      PC_CHECK(each->pool->num_free() == each->pool->num_blocks() - 1, "blocks of dead tables are free");
    }
  });
}
