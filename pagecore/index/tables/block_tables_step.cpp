// A step: takes blocks for the new tokens of many rows and fills the buffers of the forward pass.
//
// count_blocks() checks that every pool has enough blocks; only then commit_group() changes anything, and it cannot
// fail. Both walk the blocks of a row that the new tokens touch:
//
//   block size 4, length 6, 7 new tokens, spare block 5     tokens  4 5 6 7 | 8 9 ...  | 12
//                                                                   block 3 | block 5  | new
//   first = 1: has tokens, copied if shared    held = 3: new from here on    last = 4
//
// Tokens that another cache has computed arrive after a window has moved past most of them: blocks before first_taken
// are left as they are, or become holes. Shared blocks of tokens that only other layers compute again are left, too.
#include <algorithm>

#include "pagecore/index/tables/block_tables.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore {

int64_t BlockTables::check_step(RowSpan rows, CountSpan counts) {
  PC_EXPECTS(rows.size() == counts.size(), ShapeError, counts.size(), " counts are given for ", rows.size(),
             " rows; give one for each, or one for all");
  check_rows(rows);
  int64_t total = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    PC_EXPECTS(counts[i] >= 0, ShapeError, "row ", rows[i], " cannot be extended by ", counts[i],
               " tokens; use 0 or more");
    check_room(int64_t{lengths_[static_cast<size_t>(rows[i])]} + counts[i], rows[i]);
    total += counts[i];
  }
  return total;
}

void BlockTables::check_slots_out(std::span<const SlotsOut> out, int64_t num_tokens) const {
  PC_EXPECTS(out.size() == groups_.size(), ShapeError, "expected slots for ", groups_.size(), " groups, got ",
             out.size());
  for (size_t i = 0; i < out.size(); ++i) {
    PC_EXPECTS(out[i].size >= num_tokens, ShapeError, "the slots of group ", i, " have room for ", out[i].size,
               " tokens; the step has ", num_tokens);
    const int64_t num_slots = int64_t{pool_of(groups_[i]).num_blocks()} * groups_[i].block_size.divisor();
    PC_EXPECTS(out[i].type == SlotType::Int64 || num_slots <= kMaxNarrowSlots, ShapeError, "group ", i, " has ",
               num_slots, " slots; int32 slots allow up to ", kMaxNarrowSlots, ", use int64 slots or a smaller pool");
  }
}

void BlockTables::set_first_taken(std::span<const int32_t> first_blocks) {
  PC_EXPECTS(first_blocks.empty() || first_blocks.size() == groups_.size(), ShapeError, first_blocks.size(),
             " first blocks are given for ", groups_.size(), " groups; give one for each");
  for (size_t i = 0; i < first_blocks.size(); ++i) {
    PC_EXPECTS(first_blocks[i] >= 0, ShapeError, "the first block of group ", i, " is ", first_blocks[i],
               "; use 0 or more");
  }
  for (size_t i = 0; i < groups_.size(); ++i) groups_[i].first_taken = first_blocks.empty() ? 0 : first_blocks[i];
}

// Counting.

// Sets `needed` and `available` of each group; returns true if the pools have enough blocks.
bool BlockTables::count_blocks(RowSpan rows, CountSpan counts) {
  for (Group& group : groups_) count_upper(group, rows, counts);
  if (divide_available()) return true;
  for (size_t pool = 0; pool < pools_.size(); ++pool) correct_shared(pool, rows, counts);
  return divide_available();
}

// Counts every touch of a shared block as a copy: an upper bound, exact unless all holders of a block touch it.
void BlockTables::count_upper(Group& group, RowSpan rows, CountSpan counts) {
  const BlockPool::Transaction& pool = pool_of(group);
  int64_t needed = 0;
  int64_t num_shared = 0;
  size_t num_takers = 0;
  const int32_t first_taken = group.first_taken;
  group.takers.resize(std::max(group.takers.size(), rows.size()));
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t needed_before = needed;
    const Touched span = touched(group, rows[i], counts[i], first_taken);
    const BlockId* blocks = entries(group, rows[i]);
    for (int32_t at = span.first; at < std::min(span.held, span.last); ++at) {
      const int32_t holders = blocks[at] == kNullBlock ? 0 : pool.ref_count(blocks[at]);
      needed += holders != 1;
      num_shared += holders > 1;
      if (holders <= 0 && blocks[at] != kNullBlock) [[unlikely]]
        check_held(group, rows[i], at, at + 1);
    }
    needed += std::max(span.last - span.held, 0);
    group.takers[num_takers] = static_cast<uint32_t>(i);
    num_takers += needed > needed_before || first_taken > 0;  // holes extend a row, too
  }
  group.needed = needed;
  group.num_takers = num_takers;
  group.num_shared = num_shared;
}

// The last holder of a shared block writes in place: of t touches of a block with r references, only min(t, r - 1)
// copy. Groups take blocks in order, so that the last group needs one block less.
void BlockTables::correct_shared(size_t pool_index, RowSpan rows, CountSpan counts) {
  BlockPool::Transaction& pool = pools_[pool_index];
  shared_.clear();
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].pool != pool_index) continue;
    for (size_t i = 0; i < rows.size(); ++i) {
      const Touched span = touched(groups_[g], rows[i], counts[i], groups_[g].first_taken);
      const BlockId* blocks = entries(groups_[g], rows[i]);
      for (int32_t at = span.first; at < std::min(span.held, span.last); ++at) {
        if (blocks[at] != kNullBlock && pool.ref_count(blocks[at]) > 1)
          shared_.push_back({blocks[at], static_cast<uint32_t>(g)});
      }
    }
  }
  std::sort(shared_.begin(), shared_.end());
  int64_t touches = 0;
  for (size_t i = 0; i < shared_.size(); ++i) {
    touches = i > 0 && shared_[i - 1].block == shared_[i].block ? touches + 1 : 1;
    groups_[shared_[i].group].needed -= touches >= pool.ref_count(shared_[i].block);
  }
}

// Groups are served in order; each gets the free blocks of its pool that earlier groups leave.
bool BlockTables::divide_available() {
  bool suffices = true;
  for (size_t g = 0; g < groups_.size(); ++g) {
    int64_t available = pool_of(groups_[g]).num_free();
    for (size_t before = 0; before < g; ++before) {
      const Group& other = groups_[before];
      if (other.pool == groups_[g].pool) available -= std::min(other.needed, other.available);
    }
    groups_[g].available = available;
    suffices = suffices && groups_[g].needed <= available;
  }
  return suffices;
}

void BlockTables::shortage(RowSpan rows, CountSpan counts, std::span<int64_t> out,
                           std::span<const int32_t> first_blocks) {
  PC_ASSERT(out.size() == groups_.size());
  check_step(rows, counts);
  set_first_taken(first_blocks);
  const PoolsLock lock(pools_);
  static_cast<void>(count_blocks(rows, counts));
  for (size_t i = 0; i < out.size(); ++i) out[i] = std::max<int64_t>(groups_[i].needed - groups_[i].available, 0);
}

void BlockTables::fail_out_of_blocks() const {
  std::vector<int64_t> needed;
  std::vector<int64_t> available;
  std::string text;
  for (size_t i = 0; i < groups_.size(); ++i) {
    needed.push_back(groups_[i].needed);
    available.push_back(groups_[i].available);
    text += concat(i > 0 ? ", " : "", groups_[i].needed, " blocks are needed and ", groups_[i].available, " are free");
    if (groups_.size() > 1) text += concat(" in group ", i);
  }
  throw Error(text + "; free some, remove a row or make the pool larger", std::move(needed), std::move(available));
}

// Committing.

void BlockTables::take_blocks(Group& group, RowId row, TokenCount count) {
  BlockPool::Transaction& pool = pool_of(group);
  const Touched span = touched(group, row, count, group.first_taken);
  BlockId* blocks = entries(group, row);
  BlockRun& run = group.runs[static_cast<size_t>(row)];
  for (int32_t at = span.first; at < std::min(span.held, span.last); ++at) {
    const BlockId block = blocks[at];
    if (block == kNullBlock) {
      blocks[at] = pool.take();
      run.num_holes = std::min(run.num_holes, at);
      run.passed = std::min(run.passed, at);
      mark_entries(group, row, at, at + 1);
    } else if (pool.ref_count(block) > 1) {
      blocks[at] = pool.take();
      pool.drop(block);
      const int64_t start = int64_t{at} * group.block_size.divisor();
      if (start < lengths_[static_cast<size_t>(row)]) group.copies.add({block, blocks[at]});
      mark_entries(group, row, at, at + 1);
    }
  }
  for (int32_t at = span.held; at < span.last; ++at) blocks[at] = pool.take();
  mark_entries(group, row, span.held, span.last);
  run.count = std::max(run.count, span.last);
}

template <typename Slot>
Slot* BlockTables::write_slots(const Group& group, RowId row, TokenCount length, TokenCount count, Slot* out) const {
  const TokenCount block_size = group.block_size.divisor();
  int32_t at = group.block_size.floor(length);
  TokenCount offset = length - at * block_size;
  const BlockId* blocks = entries(group, row);
  if (count == 1) {  // decode
    *out = static_cast<Slot>(SlotId{blocks[at]} * block_size + offset);
    return out + 1;
  }
  for (TokenCount left = count; left > 0; ++at, offset = 0) {
    const TokenCount here = std::min(left, block_size - offset);
    out = write_run(out, SlotId{blocks[at]} * block_size + offset, here);
    left -= here;
  }
  return out;
}

template <typename Slot>
void BlockTables::commit_group(Group& group, RowSpan rows, CountSpan counts, Slot* slots) {
  for (size_t k = 0; k < group.num_takers; ++k) {
    const size_t i = group.takers[k];
    take_blocks(group, rows[i], counts[i]);
  }
  const int64_t first_token = int64_t{group.first_taken} * group.block_size.divisor();
  for (size_t i = 0; i < rows.size(); ++i) {
    TokenCount length = lengths_[static_cast<size_t>(rows[i])];
    TokenCount count = counts[i];
    const int64_t first_own = std::max<int64_t>(first_token, group.runs[static_cast<size_t>(rows[i])].shared_to);
    if (first_own > length) [[unlikely]] {
      const auto skipped = static_cast<TokenCount>(std::min<int64_t>(first_own - length, count));
      slots = std::fill_n(slots, skipped, static_cast<Slot>(kPaddingSlot));
      length += skipped;
      count -= skipped;
    }
    slots = write_slots(group, rows[i], length, count, slots);
  }
}

bool BlockTables::try_step(RowSpan rows, CountSpan counts, std::span<const SlotsOut> out) {
  const PoolsLock lock(pools_);
  const bool suffices = count_blocks(rows, counts);
  // Reserve even if blocks are short: a caller that frees some and tries again then allocates nothing.
  for (Group& group : groups_) group.copies.reserve(static_cast<size_t>(group.num_shared));
  if (!suffices) return false;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (out[i].type == SlotType::Int64) {
      commit_group(groups_[i], rows, counts, static_cast<int64_t*>(out[i].data));
    } else {
      commit_group(groups_[i], rows, counts, static_cast<int32_t*>(out[i].data));
    }
  }
  return true;
}

void BlockTables::undo_copies(RowSpan rows, int64_t group_index, std::span<const BlockCopy> copies) {
  check_rows(rows);
  check_group(group_index);
  Group& group = groups_[static_cast<size_t>(group_index)];
  const PoolsLock lock(pools_);
  BlockPool::Transaction& pool = pool_of(group);
  for (const BlockCopy copy : copies) {
    PC_ASSERT(pool.ref_count(copy.source) > 0 && pool.ref_count(copy.target) == 1);
    for (const RowId row : rows) {
      const std::span<BlockId> blocks(entries(group, row), group.runs[static_cast<size_t>(row)].count);
      const auto found = std::find(blocks.begin(), blocks.end(), copy.target);
      if (found == blocks.end()) continue;
      *found = copy.source;
      pool.share(copy.source);
      pool.drop(copy.target);
      const auto at = static_cast<int32_t>(found - blocks.begin());
      mark_entries(group, row, at, at + 1);
      break;
    }
  }
}

void BlockTables::advance(RowSpan rows, CountSpan counts) {
  for (size_t i = 0; i < rows.size(); ++i) lengths_[static_cast<size_t>(rows[i])] += counts[i];
  mark_lengths(rows);
}

bool BlockTables::try_extend(RowSpan rows, CountSpan counts, std::span<const SlotsOut> out) {
  check_slots_out(out, check_step(rows, counts));
  set_first_taken({});
  if (!try_step(rows, counts, out)) return false;
  advance(rows, counts);
  return true;
}

bool BlockTables::try_prepare(RowSpan rows, CountSpan counts, StepBuffers& out, std::span<const int32_t> first_blocks) {
  const int64_t num_tokens = check_step(rows, counts);
  PC_EXPECTS(rows.size() <= static_cast<size_t>(out.max_sequences()), ShapeError, "the step has ", rows.size(),
             " sequences; the buffers have room for ", out.max_sequences());
  PC_EXPECTS(num_tokens <= out.max_tokens(), ShapeError, "the step has ", num_tokens,
             " tokens; the buffers have room for ", out.max_tokens());
  slots_out_.clear();
  for (size_t i = 0; i < out.num_groups(); ++i) slots_out_.push_back({out.slots(i), out.max_tokens(), out.slot_type()});
  check_slots_out(slots_out_, num_tokens);
  set_first_taken(first_blocks);
  if (!try_step(rows, counts, slots_out_)) return false;
  fill_step(rows, counts, out);
  advance(rows, counts);
  return true;
}

void BlockTables::fill_step(RowSpan rows, CountSpan counts, StepBuffers& out) const {
  TokenCount total = 0;
  out.cu_query_lens()[0] = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const TokenCount length = lengths_[static_cast<size_t>(rows[i])];
    out.rows()[i] = rows[i];
    out.query_lens()[i] = counts[i];
    out.seq_lens()[i] = length + counts[i];
    for (TokenCount k = 0; k < counts[i]; ++k) out.positions()[total + k] = length + k;
    total += counts[i];
    out.cu_query_lens()[i + 1] = total;
  }
  std::fill_n(out.token_ids(), total, -1);
  out.pad(static_cast<int32_t>(rows.size()), total, max_sequences_);
}

}  // namespace pagecore
