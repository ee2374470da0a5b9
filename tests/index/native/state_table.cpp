// StateTable with a recurrence over the slots: every state that a step reads, and every checkpoint, must be the hash of
// the tokens that it covers. Freed slots are poisoned, and another holder shares checkpoints.
#include <algorithm>
#include <map>
#include <memory>

#include "pagecore/index/states/state_table.hpp"
#include "tests/native/harness.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

constexpr uint64_t kPoison = 0xdeadbeefdeadbeef;
constexpr uint64_t kStart = 0;  // the zeroed state

uint64_t after(uint64_t state, uint64_t token) { return ((state ^ token) * 0x9e3779b97f4a7c15 ^ (state >> 29)) | 1; }

// Hashes of a sequence: entry n is the state after n tokens.
using History = std::vector<uint64_t>;

struct ModelRow {
  History history = {kStart};
  bool in_flight = false;
  TokenCount count = 0;
};

class StatesLife {
 public:
  explicit StatesLife(Random& random)
      : random_(random),
        drafts_(static_cast<int32_t>(random.pick({0, 0, 1, 3}))),
        in_place_(random.one_in(2)),
        slots_(std::make_shared<BlockPool>(random.between(2, 30), Order::Lifo)),
        memory_(static_cast<size_t>(slots_->num_blocks()), kPoison),
        max_sequences_(static_cast<RowId>(random.between(1, 6))),
        buffers_(max_sequences_, drafts_) {
    const int64_t chunk = random.between(1, 6);
    const int64_t interval = chunk * random.between(1, 3), block_size = random.between(1, 6);
    const StateOptions options{chunk, interval, block_size, drafts_, in_place_, random.pick({0, 0, 3, 9})};
    table_ = std::make_unique<StateTable>(slots_, nullptr, options, max_sequences_);
  }

  void step() {
    switch (random_.below(12)) {
      case 0: return add();
      case 1: return fork();
      case 2: return remove();
      case 3: return reorder();
      case 4: return truncate();
      case 5: return end();
      case 6: return outsider();
      default: return prepare();
    }
  }

  void same() {
    std::vector<int32_t> counts(memory_.size());
    slots_->copy_ref_counts(counts);
    for (size_t slot = 0; slot < memory_.size(); ++slot) {
      if (counts[slot] == 0) memory_[slot] = kPoison;
    }
    for (const auto& [row, model] : rows_) {
      const BlockId checkpoint = table_->checkpoint(row);
      const TokenCount length = table_->checkpoint_length(row);
      if (checkpoint != kNullBlock) PC_CHECK(at(checkpoint) == model.history[static_cast<size_t>(length)], row);
      if (model.in_flight || table_->length(row) == 0) continue;
      PC_CHECK(table_->length(row) == length_of(row), "row ", row, " has ", table_->length(row));
      PC_CHECK(at(table_->slot(row)) == model.history.back(), "state of row ", row);
    }
    for (const auto& [slot, state] : foreign_) PC_CHECK(at(slot) == state, "shared slot ", slot);
    table_->check_invariants(foreign_.empty());
  }

  void finish() {
    table_.reset();
    PC_CHECK(slots_->num_used() == distinct_foreign(), slots_->num_used(), " slots in use at the end");
    slots_->check_invariants();
  }

 private:
  uint64_t& at(BlockId slot) { return memory_[static_cast<size_t>(slot)]; }
  [[nodiscard]] TokenCount length_of(RowId row) const {
    return static_cast<TokenCount>(rows_.at(row).history.size()) - 1;
  }
  [[nodiscard]] BlockId distinct_foreign() const {
    std::vector<BlockId> slots;
    for (const auto& [slot, state] : foreign_) slots.push_back(slot);
    std::sort(slots.begin(), slots.end());
    return static_cast<BlockId>(std::unique(slots.begin(), slots.end()) - slots.begin());
  }

  // Rows with or without a step in flight, in any order.
  std::vector<RowId> some_rows(bool in_flight) {
    std::vector<RowId> rows;
    for (const auto& [row, model] : rows_) {
      if (model.in_flight == in_flight) rows.push_back(row);
    }
    random_.shuffle(rows);
    if (random_.one_in(2)) rows.resize(static_cast<size_t>(random_.between(0, std::ssize(rows))));
    return rows;
  }
  RowId unused_row() {
    for (RowId row = 0; row < max_sequences_; ++row) {
      if (!rows_.contains(row)) return row;
    }
    return -1;
  }

  void add() {
    const RowId row = unused_row();
    if (row < 0) return;
    table_->check_state(0, kNullBlock);
    PC_REFUSES(InvalidBlock, table_->check_state(4, slots_->num_blocks()));
    PC_REFUSES(ShapeError, table_->check_state(4, kNullBlock));
    table_->add(row, 0, kNullBlock, static_cast<TokenCount>(random_.below(20)));
    rows_[row] = {};
  }

  void fork() {
    const RowId child = unused_row();
    const std::vector<RowId> parents = some_rows(false);
    if (child < 0 || parents.empty()) return;
    table_->check_idle({parents.data(), 1}, "forked");
    table_->fork(parents[0], child);
    rows_[child] = rows_.at(parents[0]);
  }

  void remove() {
    std::vector<RowId> rows = some_rows(random_.one_in(3));
    if (rows.size() > 1) rows.resize(1);
    table_->check_used(rows);
    table_->remove(rows);
    for (const RowId row : rows) rows_.erase(row);
    PC_REFUSES(InvalidSequence, table_->check_used(std::vector<RowId>{max_sequences_}));
  }

  void reorder() {
    const std::vector<RowId> rows = some_rows(false), all = some_rows(false);
    if (all.empty()) return;
    std::vector<RowId> parents;
    for (size_t i = 0; i < rows.size(); ++i) parents.push_back(random_.pick(all));
    const std::map<RowId, ModelRow> before = rows_;
    table_->check_reorder(rows, parents);
    table_->reorder(rows, parents);
    for (size_t i = 0; i < rows.size(); ++i) rows_[rows[i]] = before.at(parents[i]);
  }

  void truncate() {
    const std::vector<RowId> rows = some_rows(false);
    std::vector<TokenCount> lengths;
    for (const RowId row : rows) {
      const auto most = static_cast<TokenCount>(random_.between(0, length_of(row)));
      lengths.push_back(table_->resume_length(row, most));
    }
    table_->check_truncate(rows, lengths);
    table_->truncate(rows, lengths);
    for (size_t i = 0; i < rows.size(); ++i) rows_[rows[i]].history.resize(static_cast<size_t>(lengths[i]) + 1);
    if (random_.one_in(6)) table_->drop_checkpoints(rows);
  }

  void prepare() {
    const std::vector<RowId> rows = some_rows(false);
    std::vector<TokenCount> counts;
    Exact<TokenCount> all(static_cast<size_t>(max_sequences_));
    all.fill(-1);
    for (const auto& [row, model] : rows_) all[static_cast<size_t>(row)] = length_of(row);
    const TokenCount* lengths = all.data();
    for (size_t i = 0; i < rows.size(); ++i)
      counts.push_back(static_cast<TokenCount>(random_.between(0, random_.pick({1, 1 + drafts_, 20}))));
    const bool keeps = !random_.one_in(4);
    const int64_t missing = table_->shortage(rows, counts, lengths, keeps);
    const bool is_done = table_->try_reserve(rows, counts, lengths, buffers_, keeps);
    PC_CHECK(is_done == (missing == 0), "shortage ", missing);
    if (!is_done) {
      try {
        table_->fail_out_of_slots();
      } catch (const Error& error) {
        PC_CHECK(error.requested()[0] - error.available()[0] == missing, error.what());
      }
      return;
    }
    if (random_.one_in(5)) return table_->give_back();
    table_->take(rows, counts, buffers_);
    buffers_.check_invariants();
    if (random_.one_in(6)) return table_->undo(rows);
    run(rows, counts);
    if (random_.one_in(2)) commit(rows);
  }

  void run(const std::vector<RowId>& rows, const std::vector<TokenCount>& counts) {
    for (int32_t i = 0; i < buffers_.num_zeros(); ++i) at(buffers_.zeros()[i]) = kStart;
    for (int32_t i = 0; i < buffers_.num_copies(); ++i)
      at(buffers_.copies()[i].target) = at(buffers_.copies()[i].source);
    for (size_t i = 0; i < rows.size(); ++i) {
      ModelRow& row = rows_[rows[i]];
      row.in_flight = true;
      row.count = counts[i];
      if (counts[i] == 0) continue;
      PC_CHECK(at(buffers_.state_read()[i]) == row.history.back(), "row ", rows[i], " reads another state");
      for (TokenCount n = 0; n < counts[i]; ++n) {
        if (drafts_ > 0 && counts[i] <= 1 + drafts_)
          PC_CHECK(at(buffers_.draft_read(i)[n]) == row.history.back(), "row ", rows[i],
                   " has a draft of another state");
        row.history.push_back(after(row.history.back(), random_.bits()));
        if (drafts_ > 0 && counts[i] <= 1 + drafts_) at(buffers_.draft_write(i)[n]) = row.history.back();
        if (static_cast<TokenCount>(row.history.size()) - 1 == buffers_.checkpoint_lengths()[i])
          at(buffers_.checkpoint_write()[i]) = row.history.back();
      }
      at(buffers_.state_write()[i]) = row.history.back();
    }
  }

  void commit(const std::vector<RowId>& rows) {
    std::vector<TokenCount> accepted, lengths(rows.size());
    for (const RowId row : rows) accepted.push_back(rows_.at(row).count);
    if (random_.one_in(2)) {
      for (TokenCount& count : accepted) count = static_cast<TokenCount>(random_.between(-1, count));
    }
    try {
      table_->check_commit(rows, accepted, lengths);
    } catch (const Error& error) {
      PC_CHECK(error.kind() == ErrorKind::ShapeError || error.kind() == ErrorKind::UnsupportedOption, error.what());
      return;  // the steps stay in flight
    }
    table_->commit(rows, accepted);
    finish_rows(rows, lengths);
  }

  void end() {
    const std::vector<RowId> rows = some_rows(true);
    if (random_.one_in(2)) return commit(rows);
    std::vector<TokenCount> lengths(rows.size());
    table_->check_flight(rows, true, lengths);
    table_->abandon(rows);
    finish_rows(rows, lengths);
  }

  void finish_rows(const std::vector<RowId>& rows, const std::vector<TokenCount>& lengths) {
    for (size_t i = 0; i < rows.size(); ++i) {
      ModelRow& row = rows_[rows[i]];
      row.history.resize(static_cast<size_t>(lengths[i]) + 1);
      row.in_flight = false;
      row.count = 0;
      PC_CHECK(table_->length(rows[i]) == lengths[i], "length of row ", rows[i]);
    }
  }

  // Another holder shares a checkpoint, begins a row with one, or frees one.
  void outsider() {
    if (!foreign_.empty() && random_.one_in(2)) {
      const size_t which = static_cast<size_t>(random_.below(std::ssize(foreign_)));
      slots_->free({&foreign_[which].first, 1});
      foreign_.erase(foreign_.begin() + static_cast<std::ptrdiff_t>(which));
      return;
    }
    for (const RowId row : some_rows(false)) {
      const BlockId slot = table_->checkpoint(row);
      if (slot == kNullBlock) continue;
      const TokenCount length = table_->checkpoint_length(row);
      slots_->share({&slot, 1});
      foreign_.emplace_back(slot, at(slot));
      const RowId added = unused_row();
      if (added < 0) return;
      table_->check_state(length, slot);
      table_->add(added, length, slot, length + 4);
      const History& history = rows_.at(row).history;
      rows_[added].history.assign(history.begin(), history.begin() + length + 1);
      return;
    }
  }

  Random& random_;
  int32_t drafts_;
  bool in_place_;
  std::shared_ptr<BlockPool> slots_;
  std::vector<uint64_t> memory_;
  RowId max_sequences_;
  StateBuffers buffers_;
  std::unique_ptr<StateTable> table_;
  std::map<RowId, ModelRow> rows_;
  std::vector<std::pair<BlockId, uint64_t>> foreign_;
};

}  // namespace

PC_TEST(state_table_keeps_the_state_of_every_row) {
  rounds(400, [](Random& random) {
    StatesLife life(random);
    for (int64_t i = random.between(0, 120); i > 0; --i) {
      life.step();
      life.same();
    }
    life.finish();
  });
}

PC_TEST(state_table_refuses_sizes_out_of_range) {
  const auto slots = std::make_shared<BlockPool>(4, Order::Lifo);
  const auto made = [&](int64_t chunk, int64_t interval, int64_t block, int64_t drafts, int64_t rows) {
    StateTable(slots, nullptr, StateOptions{chunk, interval, block, drafts, true}, rows);
  };
  made(4, 8, 16, 0, 1);
  PC_REFUSES(ShapeError, made(0, 8, 16, 0, 1));
  PC_REFUSES(ShapeError, made(4, 6, 16, 0, 1));
  PC_REFUSES(ShapeError, made(4, 8, 0, 0, 1));
  PC_REFUSES(ShapeError, made(4, 8, 16, -1, 1));
  PC_REFUSES(ShapeError, made(4, 8, 16, 1024, 1));
  PC_REFUSES(ShapeError, made(4, 8, 16, 0, 0));
  PC_REFUSES(ShapeError, made(INT64_MAX, INT64_MAX, 16, 0, 1));
  PC_REFUSES(ShapeError, StateBuffers(-1, 0));
}
