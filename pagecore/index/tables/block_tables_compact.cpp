// Compaction: a row whose kept tokens are moved together releases the blocks after them.
//
//   block size 4, kept 0 1 2 5 6 9     tokens  0 1 2 3 | 4 5 6 7 | 8 9        blocks  7 3 9
//   unmoved = 3, length = 6                    0 1 2 5 | 6 9 . . |                    7 3
//
// Blocks from that of the first moved token on are written. Those that others share are replaced by new ones, whose
// contents the caller fills before anything else runs.
#include <algorithm>

#include "pagecore/index/tables/block_tables.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore {

bool BlockTables::try_compact(RowId row, TokenCount unmoved, TokenCount length, std::span<int64_t> missing,
                              std::span<const int32_t> replaced) {
  PC_ASSERT(missing.size() == groups_.size());
  check_rows({&row, 1});
  const TokenCount old = lengths_[static_cast<size_t>(row)];
  PC_EXPECTS(0 <= unmoved && unmoved <= length && length <= old, ShapeError, "row ", row, " cannot be compacted to ",
             length, " tokens of which ", unmoved, " stay; it has ", old);
  const PoolsLock lock(pools_);
  const auto is_shared = [&](const Group& group, int32_t at) {
    return pool_of(group).ref_count(entries(group, row)[at]) > 1;
  };
  const auto is_replaced = [&](const Group& group) {
    return std::find(replaced.begin(), replaced.end(), &group - groups_.data()) != replaced.end();
  };
  const auto first_of = [&](const Group& group) {
    if (is_replaced(group)) return group.block_size.ceil(length);
    return unmoved == length ? group.block_size.ceil(length) : group.block_size.floor(unmoved);
  };
  for (Group& group : groups_) {
    const int32_t last = group.block_size.ceil(length);
    check_held(group, row, first_of(group), group.runs[static_cast<size_t>(row)].count);
    group.needed = 0;
    for (int32_t at = first_of(group); at < last; ++at) group.needed += is_shared(group, at);
  }
  const bool suffices = divide_available();
  for (size_t g = 0; g < groups_.size(); ++g) {
    missing[g] = std::max<int64_t>(groups_[g].needed - groups_[g].available, 0);
  }
  if (!suffices) return false;
  for (Group& group : groups_) {
    BlockId* blocks = entries(group, row);
    const int32_t last = group.block_size.ceil(length);
    for (int32_t at = first_of(group); at < last; ++at) {
      if (!is_shared(group, at)) continue;
      pool_of(group).drop(blocks[at]);
      blocks[at] = pool_of(group).take();
      mark_entries(group, row, at, at + 1);
    }
    shrink(group, row, last);
    group.runs[static_cast<size_t>(row)].shared_to = 0;
  }
  lengths_[static_cast<size_t>(row)] = length;
  mark_lengths({&row, 1});
  return true;
}

void BlockTables::replace(RowId row, int64_t group_index, int32_t at, BlockId block) {
  Group& group = groups_[static_cast<size_t>(group_index)];
  BlockRun& run = group.runs[static_cast<size_t>(row)];
  PC_ASSERT(0 <= at && at < run.count);
  const PoolsLock lock(pools_);
  drop_blocks(group, row, std::max(at, run.num_holes), at + 1);
  entries(group, row)[at] = block;
  mark_entries(group, row, at, at + 1);
  run.num_holes = std::min(run.num_holes, at);
  run.passed = std::min(run.passed, at);
}

}  // namespace pagecore
