// Reordering of rows, for beam search.
#include <algorithm>

#include "pagecore/index/tables/block_tables.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore {

// A parent may itself be overwritten, so that the contents of all parents are saved first. New references are taken
// before old ones are dropped, so that no block that stays is free in between.
void BlockTables::reorder(RowSpan rows, RowSpan parents) {
  PC_EXPECTS(rows.size() == parents.size(), ShapeError, parents.size(), " parents are given for ", rows.size(),
             " rows; give one for each");
  for (const RowId parent : parents) check_row(parent);
  check_rows(rows);
  save_parents(rows, parents);
  const PoolsLock lock(pools_);
  for (const Group& group : groups_) {
    for (const RowId parent : parents)
      check_shareable(group, parent, static_cast<int64_t>(rows.size() * groups_.size()));
    for (const RowId row : rows) check_held(group, row, 0, group.runs[static_cast<size_t>(row)].count);
  }
  const BlockId* saved_blocks = saved_blocks_.data();
  const BlockRun* saved_runs = saved_runs_.data();
  for (Group& group : groups_) reorder_group(group, rows, parents, saved_blocks, saved_runs);
  for (size_t i = 0; i < rows.size(); ++i) lengths_[static_cast<size_t>(rows[i])] = saved_lengths_[i];
  mark_lengths(rows);
}

void BlockTables::save_parents(RowSpan rows, RowSpan parents) {
  saved_blocks_.clear();
  saved_runs_.clear();
  saved_lengths_.clear();
  for (const RowId parent : parents) saved_lengths_.push_back(lengths_[static_cast<size_t>(parent)]);
  for (const Group& group : groups_) {
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] == parents[i]) continue;
      const BlockRun run = group.runs[static_cast<size_t>(parents[i])];
      const BlockId* blocks = entries(group, parents[i]);
      saved_runs_.push_back(run);
      saved_blocks_.insert(saved_blocks_.end(), blocks + run.num_holes, blocks + run.count);
    }
  }
}

// Reads what save_parents() saved of this group and advances past it.
void BlockTables::reorder_group(Group& group, RowSpan rows, RowSpan parents, const BlockId*& blocks,
                                const BlockRun*& runs) {
  BlockPool::Transaction& pool = pool_of(group);
  const BlockId* block = blocks;
  const BlockRun* run = runs;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] == parents[i]) continue;
    const BlockId* const end = block + (run->count - run->num_holes);
    for (; block != end; ++block) {
      if (*block != kNullBlock) pool.share(*block);
    }
    ++run;
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != parents[i]) shrink(group, rows[i], 0);
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] == parents[i]) continue;
    std::copy(blocks, blocks + (runs->count - runs->num_holes), entries(group, rows[i]) + runs->num_holes);
    group.runs[static_cast<size_t>(rows[i])] = *runs;
    mark_entries(group, rows[i], runs->num_holes, runs->count);
    blocks += runs->count - runs->num_holes;
    ++runs;
  }
}

}  // namespace pagecore
