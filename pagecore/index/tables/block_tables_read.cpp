// Contents of the block tables: lengths, blocks, dense tables, pending copies, changes, invariants.
#include <algorithm>
#include <limits>

#include "pagecore/index/tables/block_tables.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore {

TokenCount BlockTables::length(RowId row) const {
  check_row(row);
  return lengths_[static_cast<size_t>(row)];
}

int64_t BlockTables::capacity(RowId row) const {
  check_row(row);
  int64_t capacity = groups_.empty() ? max_length_ : INT64_MAX;
  for (const Group& group : groups_) {
    capacity = std::min(capacity, int64_t{group.runs[static_cast<size_t>(row)].count} * group.block_size.divisor());
  }
  return capacity;
}

std::span<const BlockId> BlockTables::blocks(RowId row, int64_t group_index) const {
  check_row(row);
  check_group(group_index);
  const Group& group = groups_[static_cast<size_t>(group_index)];
  return {entries(group, row), static_cast<size_t>(group.runs[static_cast<size_t>(row)].count)};
}

const BlockId* BlockTables::table(int64_t group) const {
  check_group(group);
  return groups_[static_cast<size_t>(group)].table.data();
}

void BlockTables::fill(RowSpan rows, int64_t group_index, const DenseTable& out) const {
  check_group(group_index);
  const Group& group = groups_[static_cast<size_t>(group_index)];
  PC_EXPECTS(static_cast<int64_t>(rows.size()) <= out.num_rows, ShapeError, "out has ", out.num_rows,
             " rows; expected at least ", rows.size());
  for (const RowId row : rows) {
    check_row(row);
    const int32_t needed = group.block_size.ceil(lengths_[static_cast<size_t>(row)]);
    PC_EXPECTS(needed <= out.width, ShapeError, "out has ", out.width, " columns; row ", row, " has tokens in ", needed,
               " blocks");
  }
  for (int64_t i = 0; i < out.num_rows; ++i) {
    BlockId* const line = out.blocks + i * out.stride;
    int64_t count = 0;
    if (i < static_cast<int64_t>(rows.size())) {
      const RowId row = rows[static_cast<size_t>(i)];
      count = std::min<int64_t>(group.runs[static_cast<size_t>(row)].count, out.width);
      std::copy_n(entries(group, row), count, line);
    }
    std::fill(line + count, line + out.width, kNullBlock);
  }
  for (int64_t i = 0; i < out.num_lengths; ++i) {
    const bool is_row = i < static_cast<int64_t>(rows.size());
    out.lengths[i] = is_row ? lengths_[static_cast<size_t>(rows[static_cast<size_t>(i)])] : 0;
  }
}

size_t BlockTables::settle_copies(int64_t group_index) {
  check_group(group_index);
  Group& group = groups_[static_cast<size_t>(group_index)];
  if (group.copies.size() == 0) return 0;
  const PoolsLock lock(pools_);
  return group.copies.settle([&](BlockId block) { return pool_of(group).ref_count(block) > 0; });
}

void BlockTables::take_copies(int64_t group, std::span<BlockCopy> out) {
  check_group(group);
  groups_[static_cast<size_t>(group)].copies.take(out);
}

void BlockTables::follow_changes() {
  const int64_t num_entries = num_table_entries() + max_sequences_ + 1;
  PC_EXPECTS(num_entries <= std::numeric_limits<int32_t>::max(), ShapeError, "the tables have ", num_entries,
             " entries; changes can be followed in up to ", std::numeric_limits<int32_t>::max(),
             "; lower max_sequences or max_blocks_per_sequence");
  changed_ = std::make_unique<ChangedEntries>(static_cast<int32_t>(num_entries));
  for (RowId row = 0; row < max_sequences_; ++row) {
    if (!rows_[static_cast<size_t>(row)].is_used) continue;
    mark_lengths({&row, 1});
    for (const Group& group : groups_) mark_entries(group, row, 0, group.runs[static_cast<size_t>(row)].count);
  }
}

size_t BlockTables::take_changes(std::span<ChangedEntry> out) {
  PC_EXPECTS(changed_ != nullptr, UnsupportedOption,
             "changes of these tables are not recorded; call follow_changes() first");
  const bool has_groups = !groups_.empty();
  const int64_t num_in_group = has_groups ? num_table_entries() / std::ssize(groups_) : 0;
  const BlockId* table = has_groups ? groups_[0].table.data() : lengths_.data();
  int64_t first = 0;  // index of the first entry of `table`
  size_t group = 0;
  return changed_->take(out, [&](int32_t index) {
    for (; index - first >= num_in_group && group < groups_.size(); first += num_in_group)
      table = ++group < groups_.size() ? groups_[group].table.data() : lengths_.data();
    return table[index - first];
  });
}

size_t BlockTables::num_pending_copies() const {
  size_t count = 0;
  for (const Group& group : groups_) count += group.copies.size();
  return count;
}

size_t BlockTables::nbytes() const {
  size_t nbytes =
      sizeof(*this) + rows_.nbytes() + lengths_.nbytes() + free_rows_.nbytes() + groups_.capacity() * sizeof(Group);
  if (changed_ != nullptr) nbytes += changed_->nbytes();
  for (const Group& group : groups_) nbytes += group.table.nbytes() + group.runs.nbytes() + group.copies.nbytes();
  return nbytes;
}

void BlockTables::check_invariants(bool exclusive) const {
  std::vector<bool> is_free(static_cast<size_t>(max_sequences_));
  free_rows_.check_invariants();
  free_rows_.for_each([&](BlockId id) { is_free[static_cast<size_t>(id - 1)] = true; });
  for (size_t row = 0; row < is_free.size(); ++row) {
    PC_ASSERT(is_free[row] != rows_[row].is_used);
    PC_ASSERT(lengths_[row] >= 0 && lengths_[row] <= (rows_[row].is_used ? max_length_ : 0));
  }
  PC_ASSERT(lengths_[static_cast<size_t>(max_sequences_)] == 0);
  for (const Group& group : groups_) check_group_invariants(group);
  if (changed_ != nullptr) changed_->check_invariants();
  check_references(exclusive);
}

void BlockTables::check_group_invariants(const Group& group) const {
  group.copies.check_invariants();
  for (RowId row = 0; row <= max_sequences_; ++row) {
    const bool is_null_row = row == max_sequences_;
    const BlockRun run = is_null_row ? BlockRun{0, 0} : group.runs[static_cast<size_t>(row)];
    PC_ASSERT(0 <= run.num_holes && run.num_holes <= run.count && run.count <= max_blocks_);
    PC_ASSERT(is_null_row || rows_[static_cast<size_t>(row)].is_used || run.count == 0);
    PC_ASSERT(is_null_row || lengths_[static_cast<size_t>(row)] <= int64_t{run.count} * group.block_size.divisor());
    PC_ASSERT(run.shared_to <= int64_t{run.count} * group.block_size.divisor());
    const BlockId* blocks = entries(group, row);
    for (int32_t i = 0; i < max_blocks_; ++i) {
      PC_ASSERT(blocks[i] >= kNullBlock && blocks[i] < pool_of(group).num_blocks());
      PC_ASSERT(blocks[i] == kNullBlock || (i >= run.num_holes && i < run.count));
      PC_ASSERT(blocks[i] == kNullBlock || i < run.kept || i >= run.passed);
    }
  }
}

void BlockTables::check_references(bool exclusive) const {
  const PoolsLock lock(pools_);
  for (size_t pool = 0; pool < pools_.size(); ++pool) {
    std::vector<int32_t> held(static_cast<size_t>(pools_[pool].num_blocks()));
    for (const Group& group : groups_) {
      for (RowId row = 0; row < max_sequences_ && group.pool == pool; ++row) {
        const BlockId* blocks = entries(group, row);
        for (int32_t i = 0; i < group.runs[static_cast<size_t>(row)].count; ++i)
          held[static_cast<size_t>(blocks[i])] += 1;
      }
    }
    for (BlockId block = 1; block < pools_[pool].num_blocks(); ++block) {
      const int32_t counted = std::max(pools_[pool].ref_count(block), 0);
      PC_ASSERT(held[static_cast<size_t>(block)] <= counted);
      PC_ASSERT(!exclusive || held[static_cast<size_t>(block)] == counted);
    }
  }
}

}  // namespace pagecore
