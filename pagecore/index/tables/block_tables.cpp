// Rows of the block tables: add, fork, truncate, remove. Steps are in block_tables_step.cpp.
#include "pagecore/index/tables/block_tables.hpp"

#include <algorithm>
#include <functional>

#include "pagecore/index/sizes.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore {
namespace {

constexpr const char* kLongerRows =
    ": give the tables more max_blocks_per_sequence, a cache more max_tokens_per_sequence or num_blocks";

TokenCount longest(const std::vector<int64_t>& block_sizes, int64_t max_blocks) {
  int64_t length = kMaxInt32;
  for (const int64_t size : block_sizes)
    length = std::min(length, checked_size("block_size", size, 1, kMaxInt32) * max_blocks);
  return static_cast<TokenCount>(length);
}

std::vector<std::shared_ptr<BlockPool>> distinct(std::vector<std::shared_ptr<BlockPool>> pools) {
  std::sort(pools.begin(), pools.end(), [](const auto& a, const auto& b) { return std::less<>{}(a.get(), b.get()); });
  pools.erase(std::unique(pools.begin(), pools.end()), pools.end());
  return pools;
}

}  // namespace

BlockTables::Group::Group(size_t pool, BlockId num_blocks, TokenCount block_size, size_t num_rows, size_t max_blocks)
    : pool(pool), block_size(block_size), table((num_rows + 1) * max_blocks), runs(num_rows), copies(num_blocks) {}

BlockTables::BlockTables(std::vector<std::shared_ptr<BlockPool>> pools, std::vector<int64_t> block_sizes,
                         int64_t max_sequences, int64_t max_blocks_per_sequence)
    : max_sequences_(checked_size("max_sequences", max_sequences, 1, kMaxInt32 - 1)),
      max_blocks_(checked_size("max_blocks_per_sequence", max_blocks_per_sequence, 1, kMaxInt32)),
      max_length_(longest(block_sizes, max_blocks_)),
      owners_(distinct(pools)),
      rows_(static_cast<size_t>(max_sequences_)),
      lengths_(static_cast<size_t>(max_sequences_) + 1),
      free_rows_(max_sequences_ + 1, Order::Address) {
  PC_EXPECTS(pools.size() <= kMaxGroups, ShapeError, pools.size(), " pools are given; use at most ", kMaxGroups);
  PC_EXPECTS(std::max<size_t>(pools.size(), 1) == block_sizes.size(), ShapeError, block_sizes.size(),
             " block sizes are given for ", pools.size(), " pools; give one for each, or one without pools");
  for (const auto& owner : owners_) pools_.emplace_back(*owner);
  groups_.reserve(pools.size());
  for (size_t i = 0; i < pools.size(); ++i) {
    const auto owner = std::find(owners_.begin(), owners_.end(), pools[i]);
    groups_.emplace_back(static_cast<size_t>(owner - owners_.begin()), pools[i]->num_blocks(),
                         static_cast<TokenCount>(block_sizes[i]), static_cast<size_t>(max_sequences_),
                         static_cast<size_t>(max_blocks_));
  }
}

BlockTables::~BlockTables() {
  const PoolsLock lock(pools_);
  for (Group& group : groups_) {
    for (RowId row = 0; row < max_sequences_ && num_rows() > 0; ++row) {
      const BlockId* blocks = entries(group, row);
      for (int32_t i = group.runs[static_cast<size_t>(row)].count; i-- > 0;) {
        // Skip a block whose reference another holder has dropped by mistake: a destructor cannot raise.
        if (blocks[i] != kNullBlock && pool_of(group).ref_count(blocks[i]) > 0) pool_of(group).drop(blocks[i]);
      }
    }
  }
}

// Checks.

void BlockTables::refuse_row(RowId row) const {
  fail(ErrorKind::InvalidSequence, "row ", row,
       " is not in use; use a row that add or fork returned and that was not removed");
}

void BlockTables::check_rows(RowSpan rows) {
  ++num_calls_;
  for (const RowId row : rows) {
    check_row(row);
    uint64_t& seen = rows_[static_cast<size_t>(row)].seen;
    PC_EXPECTS(seen != num_calls_, InvalidSequence, "row ", row, " is repeated in one call; list each row once");
    seen = num_calls_;
  }
}

void BlockTables::check_group(int64_t group) const {
  PC_EXPECTS(!groups_.empty(), ShapeError, "group is ", group, "; the tables have no groups, make them with pools");
  PC_EXPECTS(group >= 0 && group < static_cast<int64_t>(groups_.size()), ShapeError, "group is ", group, "; use 0 to ",
             groups_.size() - 1);
}

void BlockTables::check_room(int64_t tokens, RowId row) const {
  PC_EXPECTS(tokens <= max_length_, ShapeError, "row ", row, " would have ", tokens, " tokens; a row holds at most ",
             max_length_, kLongerRows);
}

void BlockTables::check_held(const Group& group, RowId row, int32_t from, int32_t to) const {
  const BlockId* blocks = entries(group, row);
  for (int32_t i = std::max(from, group.runs[static_cast<size_t>(row)].num_holes); i < to; ++i) {
    PC_EXPECTS(blocks[i] == kNullBlock || pool_of(group).ref_count(blocks[i]) > 0, DoubleFree, "block ", blocks[i],
               " of row ", row, " was freed by another holder of the pool; drop only references of your own");
  }
}

void BlockTables::check_shareable(const Group& group, RowId row, int64_t times) const {
  const BlockRun& run = group.runs[static_cast<size_t>(row)];
  check_held(group, row, 0, run.count);
  const BlockId* blocks = entries(group, row);
  for (int32_t i = run.num_holes; i < run.count; ++i) {
    PC_EXPECTS(blocks[i] == kNullBlock || pool_of(group).ref_count(blocks[i]) <= kMaxInt32 - times, ShapeError,
               "block ", blocks[i], " of row ", row, " has the maximum number of references; remove some");
  }
}

// Returns the tokens of the longest list.
int64_t BlockTables::check_prefix(std::span<const std::span<const BlockId>> prefix, int64_t length) const {
  if (prefix.empty()) return groups_.empty() && length != kWhole ? length : 0;
  PC_EXPECTS(prefix.size() == groups_.size(), ShapeError, "expected ", groups_.size(),
             " prefix lists, one for each group, got ", prefix.size());
  const auto tokens_of = [&](size_t i) {
    return static_cast<int64_t>(prefix[i].size()) * groups_[i].block_size.divisor();
  };
  int64_t longest = 0;
  for (size_t i = 0; i < prefix.size(); ++i) {
    const int64_t tokens = tokens_of(i);
    PC_EXPECTS(length != kWhole || tokens == tokens_of(0), ShapeError, "the prefix has ", tokens, " tokens in group ",
               i, " and ", tokens_of(0), " in group 0; give blocks for the same tokens");
    PC_EXPECTS(tokens >= length, ShapeError, "length is ", length, " and the prefix has ", tokens, " tokens in group ",
               i, "; use 0 to ", tokens);
    PC_EXPECTS(tokens <= max_length_, ShapeError, "the prefix has ", tokens, " tokens; a row holds at most ",
               max_length_, kLongerRows);
    longest = std::max(longest, tokens);
  }
  return longest;
}

void BlockTables::check_prefix_blocks(const Group& group, std::span<const BlockId> blocks, int64_t length) const {
  const BlockPool::Transaction& pool = pool_of(group);
  const int64_t first_shared = length / group.block_size.divisor();  // blocks from here on are read, but not written
  for (size_t i = 0; i < blocks.size(); ++i) {
    const BlockId block = blocks[i];
    const bool is_hole = block == kNullBlock;
    PC_EXPECTS(!is_hole || static_cast<int64_t>(i) < first_shared, InvalidBlock, "entry ", i,
               " of a prefix is a hole after its first ", length, " tokens; only computed tokens can have holes");
    if (is_hole) continue;
    PC_EXPECTS(block > kNullBlock && block < pool.num_blocks(), InvalidBlock, "block ", block,
               " cannot be in a prefix; use ids from 1 to ", pool.num_blocks() - 1, ", or 0 for a hole");
    const int32_t count = pool.ref_count(block);
    PC_EXPECTS(count > 0, DoubleFree, "block ", block,
               " of a prefix is free; only blocks with references can be shared");
    PC_EXPECTS(count <= kMaxInt32 - static_cast<int64_t>(blocks.size() * groups_.size()), ShapeError, "block ", block,
               " has the maximum number of references; remove some");
  }
}

void BlockTables::check_row_left() const {
  PC_EXPECTS(free_rows_.size() > 0, OutOfRows, "all ", max_sequences_,
             " rows are in use; remove one or raise max_sequences");
}

// Changes of rows.

RowId BlockTables::take_row(TokenCount length) {
  BlockId id = kNullBlock;
  free_rows_.take({&id, 1});
  const RowId row = id - 1;
  lengths_[static_cast<size_t>(row)] = length;
  rows_[static_cast<size_t>(row)].is_used = true;
  mark_lengths({&row, 1});
  return row;
}

RowId BlockTables::add(std::span<const std::span<const BlockId>> prefix, int64_t length) {
  const int64_t longest = check_prefix(prefix, length);
  if (length == kWhole) length = longest;
  PC_EXPECTS(length >= 0 && length <= std::min<int64_t>(longest, max_length_), ShapeError, "length is ", length,
             " and the prefix has ", longest, " tokens; use 0 to ", std::min<int64_t>(longest, max_length_));
  check_row_left();
  const PoolsLock lock(pools_);
  const auto tokens_of = [&](size_t i) {
    return static_cast<int64_t>(prefix[i].size()) * groups_[i].block_size.divisor();
  };
  for (size_t i = 0; i < prefix.size(); ++i) {
    const int64_t tokens = tokens_of(i);
    check_prefix_blocks(groups_[i], prefix[i], length < tokens ? length : tokens + groups_[i].block_size.divisor());
  }
  const RowId row = take_row(static_cast<TokenCount>(length));
  for (size_t i = 0; i < prefix.size(); ++i) {
    Group& group = groups_[i];
    std::copy(prefix[i].begin(), prefix[i].end(), entries(group, row));
    const auto first =
        std::find_if(prefix[i].begin(), prefix[i].end(), [](BlockId block) { return block != kNullBlock; });
    for (const BlockId block : prefix[i]) {
      if (block != kNullBlock) pool_of(group).share(block);
    }
    const BlockRun run{static_cast<int32_t>(prefix[i].size()), static_cast<int32_t>(first - prefix[i].begin()), 0, 0,
                       static_cast<TokenCount>(tokens_of(i))};
    group.runs[static_cast<size_t>(row)] = run;
    mark_entries(group, row, run.num_holes, run.count);
  }
  return row;
}

RowId BlockTables::fork(RowId parent) {
  check_row(parent);
  check_row_left();
  const PoolsLock lock(pools_);
  for (const Group& group : groups_) check_shareable(group, parent, static_cast<int64_t>(groups_.size()));
  const RowId row = take_row(lengths_[static_cast<size_t>(parent)]);
  for (Group& group : groups_) {
    const BlockRun run = group.runs[static_cast<size_t>(parent)];
    const BlockId* blocks = entries(group, parent);
    std::copy(blocks + run.num_holes, blocks + run.count, entries(group, row) + run.num_holes);
    for (int32_t i = run.num_holes; i < run.count; ++i) {
      if (blocks[i] != kNullBlock) pool_of(group).share(blocks[i]);
    }
    group.runs[static_cast<size_t>(row)] = run;
    mark_entries(group, row, run.num_holes, run.count);
  }
  return row;
}

int64_t BlockTables::drop_blocks(Group& group, RowId row, int32_t from, int32_t to) {
  BlockPool::Transaction& pool = pool_of(group);
  BlockId* blocks = entries(group, row);
  int64_t freed = 0;
  for (int32_t i = to; i-- > from;) {
    const BlockId block = blocks[i];
    if (block == kNullBlock) continue;
    PC_ASSERT(pool.ref_count(block) > 0);
    blocks[i] = kNullBlock;
    if (!pool.drop(block)) continue;
    group.copies.drop(block);
    ++freed;
  }
  mark_entries(group, row, from, to);
  return freed;
}

void BlockTables::shrink(Group& group, RowId row, int32_t count) {
  BlockRun& run = group.runs[static_cast<size_t>(row)];
  if (count >= run.count) return;
  drop_blocks(group, row, std::max(count, run.num_holes), run.count);
  run = {count, std::min(count, run.num_holes), run.kept, std::min(count, run.passed),
         static_cast<TokenCount>(std::min<int64_t>(run.shared_to, int64_t{count} * group.block_size.divisor()))};
}

void BlockTables::remove(RowSpan rows) {
  check_rows(rows);
  const PoolsLock lock(pools_);
  for (const Group& group : groups_) {
    for (const RowId row : rows) check_held(group, row, 0, group.runs[static_cast<size_t>(row)].count);
  }
  for (Group& group : groups_) {
    for (const RowId row : rows) shrink(group, row, 0);
  }
  for (const RowId row : rows) {
    lengths_[static_cast<size_t>(row)] = 0;
    rows_[static_cast<size_t>(row)].is_used = false;
    free_rows_.push(row + 1);
  }
  mark_lengths(rows);
}

void BlockTables::truncate(RowSpan rows, CountSpan lengths, bool keep_capacity) {
  PC_EXPECTS(rows.size() == lengths.size(), ShapeError, lengths.size(), " lengths are given for ", rows.size(),
             " rows; give one for each, or one for all");
  check_rows(rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    const TokenCount length = lengths_[static_cast<size_t>(rows[i])];
    PC_EXPECTS(lengths[i] >= 0 && lengths[i] <= length, ShapeError, "row ", rows[i], " cannot be cut to ", lengths[i],
               " tokens; it has ", length, ", use 0 to ", length);
  }
  const PoolsLock lock(pools_);
  for (size_t g = 0; g < groups_.size() && !keep_capacity; ++g) {
    for (size_t i = 0; i < rows.size(); ++i) {
      check_held(groups_[g], rows[i], groups_[g].block_size.ceil(lengths[i]),
                 groups_[g].runs[static_cast<size_t>(rows[i])].count);
    }
  }
  for (size_t g = 0; g < groups_.size() && !keep_capacity; ++g) {
    for (size_t i = 0; i < rows.size(); ++i) shrink(groups_[g], rows[i], groups_[g].block_size.ceil(lengths[i]));
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    TokenCount& length = lengths_[static_cast<size_t>(rows[i])];
    for (Group& group : groups_) {
      TokenCount& shared_to = group.runs[static_cast<size_t>(rows[i])].shared_to;
      if (lengths[i] < length || !keep_capacity) shared_to = std::min(shared_to, lengths[i]);
    }
    length = lengths[i];
  }
  mark_lengths(rows);
}

int64_t BlockTables::release_before(RowSpan rows, int64_t group_index, CountSpan positions, int64_t first) {
  check_group(group_index);
  PC_EXPECTS(rows.size() == positions.size(), ShapeError, positions.size(), " positions are given for ", rows.size(),
             " rows; give one for each, or one for all");
  PC_EXPECTS(first >= 0 && first <= kMaxInt32, ShapeError, "first is ", first, "; use 0 to ", kMaxInt32);
  check_rows(rows);
  Group& group = groups_[static_cast<size_t>(group_index)];
  for (size_t i = 0; i < rows.size(); ++i) {
    const TokenCount length = lengths_[static_cast<size_t>(rows[i])];
    PC_EXPECTS(positions[i] >= 0 && positions[i] <= length, ShapeError, "row ", rows[i], " has ", length,
               " tokens; position ", positions[i], " is not among them, use 0 to ", length);
  }
  const PoolsLock lock(pools_);
  const int32_t kept = group.block_size.ceil(static_cast<TokenCount>(first));
  const auto first_dropped = [&](const BlockRun& run) {
    if (kept == 0) return run.num_holes;
    return run.kept == kept ? std::max(kept, run.passed) : kept;
  };
  for (const RowId row : rows) {
    BlockRun& run = group.runs[static_cast<size_t>(row)];
    if (run.kept != kept && kept > 0) run.kept = kept, run.passed = kept;
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const int32_t from = first_dropped(group.runs[static_cast<size_t>(rows[i])]);
    check_held(group, rows[i], from, group.block_size.floor(positions[i]));
  }
  int64_t freed = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    BlockRun& run = group.runs[static_cast<size_t>(rows[i])];
    const int32_t num_passed = group.block_size.floor(positions[i]);
    freed += drop_blocks(group, rows[i], first_dropped(run), num_passed);
    int32_t& known = kept == 0 ? run.num_holes : run.passed;
    known = std::max(known, num_passed);
  }
  return freed;
}

}  // namespace pagecore
