// BlockTables and their model: random groups and pools, random arguments, comparisons, and another holder of blocks
// of the same pools.
#pragma once

#include <limits>
#include <memory>

#include "tests/index/native/model_tables.hpp"

namespace pagecore::test {

class TablesFixture {
 public:
  explicit TablesFixture(Random& random) : random_(random) {
    const int64_t num_groups = random.between(1, 3);
    std::vector<std::shared_ptr<BlockPool>> of_groups;
    std::vector<int64_t> sizes;
    for (int64_t g = 0; g < num_groups; ++g) {
      if (pools_.empty() || !random.one_in(3)) make_pool();
      model_.pool_of.push_back(pools_.size() - 1);
      model_.block_sizes.push_back(static_cast<TokenCount>(random.pick({1, 2, 3, 4, 16})));
      of_groups.push_back(pools_.back());
      sizes.push_back(model_.block_sizes.back());
    }
    model_.copies.resize(static_cast<size_t>(num_groups));
    model_.max_sequences = static_cast<RowId>(random.between(1, 6));
    model_.max_blocks = static_cast<int32_t>(random.between(1, 7));
    tables_ = std::make_unique<BlockTables>(of_groups, sizes, model_.max_sequences, model_.max_blocks);
  }

  void same() {
    for (size_t i = 0; i < pools_.size(); ++i) same_counts(*pools_[i], model_.pools[i]);
    PC_CHECK(tables_->num_rows() == std::ssize(model_.rows), tables_->num_rows());
    for (RowId row = 0; row <= model_.max_sequences; ++row)
      PC_CHECK(tables_->lengths()[row] == length_of(row), "length ", tables_->lengths()[row], " of row ", row);
    for (const auto& [name, row] : model_.rows) {
      PC_CHECK(tables_->length(name) == row.length, "row ", name, " has ", tables_->length(name), " tokens");
      PC_CHECK(tables_->capacity(name) == model_.capacity(name), name);
      for (size_t g = 0; g < model_.num_groups(); ++g) {
        const auto blocks = tables_->blocks(name, static_cast<int64_t>(g));
        PC_CHECK(std::equal(blocks.begin(), blocks.end(), row.blocks[g].begin(), row.blocks[g].end()), "row ", name,
                 " group ", g, ": ", shown(blocks), ", expected ", shown(row.blocks[g]));
      }
    }
  }

  // A mirror that receives every change, in batches of any size, equals the tables.
  void same_copy() {
    if (copy_.empty() || random_.one_in(3)) return;
    for (bool is_all = false; !is_all;) {
      Exact<ChangedEntry> changes(static_cast<size_t>(random_.pick({int64_t{1}, int64_t{3}, random_.between(1, 400)})));
      const size_t count = tables_->take_changes(changes.span());
      PC_CHECK(count <= changes.size(), count);
      for (size_t i = 0; i < count; ++i) {
        PC_CHECK(i == 0 || changes[i - 1].index < changes[i].index, "changes ascend");
        copy_.at(static_cast<size_t>(changes[i].index)) = static_cast<int32_t>(changes[i].value);
      }
      is_all = count < changes.size();
    }
    size_t at = 0;
    for (size_t g = 0; g < model_.num_groups(); ++g) {
      const BlockId* table = tables_->table(static_cast<int64_t>(g));
      for (size_t i = 0; i < num_entries(); ++i, ++at)
        PC_CHECK(copy_[at] == table[i], "group ", g, " entry ", i, " is ", copy_[at], ", expected ", table[i]);
    }
    for (RowId row = 0; row <= model_.max_sequences; ++row, ++at)
      PC_CHECK(copy_[at] == tables_->lengths()[row], "length ", copy_[at], " of row ", row);
  }

  void end() {
    same();
    same_copy();
    tables_->check_invariants(false);
    tables_.reset();
    for (const auto& [name, row] : model_.rows) forget(row);
    for (size_t i = 0; i < pools_.size(); ++i) {
      PC_CHECK(pools_[i]->num_free() == model_.pools[i].num_free(), pools_[i]->num_free(),
               " free after everything was removed");
      pools_[i]->check_invariants();
    }
  }

 protected:
  using Rows = std::vector<RowId>;
  using Counts = std::vector<TokenCount>;
  static constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  static constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();

  // Starts anew each time: follow_changes() restarts the recording.
  void follow() {
    tables_->follow_changes();
    copy_.assign(model_.num_groups() * num_entries() + static_cast<size_t>(model_.max_sequences) + 1, 0);
  }

  RowId any_row() {
    if (random_.one_in(40)) return random_.pick({-1, model_.max_sequences, kMost, kLeast});
    return static_cast<RowId>(random_.below(model_.max_sequences));
  }

  // Used rows in any order; sometimes with an invalid one.
  Rows some_rows() {
    Rows rows;
    for (const auto& [name, row] : model_.rows) rows.push_back(name);
    random_.shuffle(rows);
    rows.resize(static_cast<size_t>(random_.between(0, std::ssize(rows))));
    if (random_.one_in(15)) rows.push_back(any_row());
    return rows;
  }

  TokenCount length_of(RowId row) const { return model_.rows.contains(row) ? model_.rows.at(row).length : 0; }

  // A number for each row, from 0 to its length; rarely an invalid one.
  Counts positions(const Rows& rows) {
    Counts counts;
    for (const RowId row : rows) counts.push_back(static_cast<TokenCount>(random_.between(0, length_of(row))));
    spoil(counts);
    return counts;
  }
  void spoil(Counts& counts) {
    if (!counts.empty() && random_.one_in(20)) random_.pick(counts) = random_.pick({-1, kMost, kLeast, kMost - 1});
    if (random_.one_in(60)) counts.push_back(0);
  }

  // Another holder takes and shares blocks of the same pools, and frees only its own references.
  void outsider() {
    const auto which = static_cast<size_t>(random_.below(std::ssize(pools_)));
    auto& mine = theirs_[which];
    Exact<BlockId> block(1);
    if (!mine.empty() && random_.one_in(2)) {
      block[0] = mine.back();
      mine.pop_back();
      model_.pools[which].drop(block[0]);
      pools_[which]->free(block.span());
      return;
    }
    block[0] = static_cast<BlockId>(random_.below(model_.pools[which].num_blocks()));
    if (model_.pools[which].holders(block[0]) == 0) {
      if (model_.pools[which].num_free() == 0) return;
      PC_CHECK(pools_[which]->try_allocate(block.span()), "a free block cannot be allocated");
      PC_CHECK(model_.pools[which].take() == block[0], block[0]);
    } else {
      model_.pools[which].share(block[0]);
      pools_[which]->share(block.span());
    }
    mine.push_back(block[0]);
  }

  // True if no other holder has a block.
  [[nodiscard]] bool is_alone() const {
    return std::ranges::all_of(theirs_, [](const auto& blocks) { return blocks.empty(); });
  }

  Random& random_;
  ModelTables model_;
  std::vector<std::shared_ptr<BlockPool>> pools_;
  std::unique_ptr<BlockTables> tables_;

 private:
  [[nodiscard]] size_t num_entries() const {
    return static_cast<size_t>(model_.max_sequences + 1) * static_cast<size_t>(model_.max_blocks);
  }

  void make_pool() {
    const Order order = random_.pick({Order::Lifo, Order::Fifo, Order::Address});
    const auto num_blocks = static_cast<BlockId>(random_.between(2, 40));
    pools_.push_back(std::make_shared<BlockPool>(num_blocks, order));
    model_.pools.emplace_back(num_blocks, order);
  }

  void forget(const ModelRow& row) {
    for (size_t g = 0; g < model_.num_groups(); ++g) {
      for (const BlockId block : row.blocks[g]) {
        if (block != kNullBlock) model_.pool(g).drop(block);
      }
    }
  }

  std::vector<int32_t> copy_;       // mirror of tables and lengths, after follow_changes()
  std::vector<BlockId> theirs_[3];  // references of another holder, by pool
};

}  // namespace pagecore::test
