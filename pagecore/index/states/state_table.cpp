// Rows of the state table: add, fork, reorder, truncate, remove, invariants. Steps are in state_table_step.cpp.
#include "pagecore/index/states/state_table.hpp"

#include <algorithm>
#include <limits>
#include <mutex>

#include "pagecore/native/checks.hpp"

namespace pagecore {
namespace {

int32_t checked_rows(int64_t value) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1;
  PC_EXPECTS(value >= 1 && value <= kMost, ShapeError, "max_sequences is ", value, "; use 1 to ", kMost);
  return static_cast<int32_t>(value);
}

}  // namespace

StateTable::StateTable(std::shared_ptr<BlockPool> slots, std::shared_ptr<BlockPool> checkpoints,
                       const StateOptions& options, int64_t max_sequences)
    : owner_(std::move(slots)),
      owner_of_checkpoints_(checkpoints != nullptr ? std::move(checkpoints) : owner_),
      quantises_(owner_of_checkpoints_ != owner_),
      slots_(*owner_),
      checkpoints_(*owner_of_checkpoints_),
      pools_(*owner_, *owner_of_checkpoints_),
      grid_(options.chunk, options.interval, options.block_size, options.draft_tokens, options.delay),
      in_place_(options.in_place),
      max_sequences_(checked_rows(max_sequences)),
      rows_(static_cast<size_t>(max_sequences_)),
      written_(static_cast<size_t>(max_sequences_) * static_cast<size_t>(grid_.draft_tokens() + 1)) {}

StateTable::~StateTable() {
  const std::lock_guard lock(pools_);
  for (RowId row = 0; row < max_sequences_; ++row) {
    if (at(row).is_used) release(at(row));
  }
}

// Checks.

void StateTable::refuse_row(RowId row) const {
  fail(ErrorKind::InvalidSequence, "row ", row,
       " is not in use in the state table; use a row that its add or fork returned and that was not removed");
}

void StateTable::check_used(RowSpan rows) {
  ++num_calls_;
  for (const RowId row : rows) {
    static_cast<void>(used(row));
    PC_EXPECTS(at(row).seen != num_calls_, InvalidSequence, "row ", row,
               " is repeated in one call; list each row once");
    at(row).seen = num_calls_;
  }
}

void StateTable::check_idle(RowSpan rows, const char* verb) {
  check_used(rows);
  for (const RowId row : rows) {
    PC_EXPECTS(!at(row).in_flight, InvalidSequence, "row ", row, " cannot be ", verb,
               " while a step of it is in flight; commit or abandon the step first");
  }
}

void StateTable::check_state(TokenCount length, int64_t state) const {
  PC_EXPECTS(state >= kNullBlock && state < checkpoints_.num_blocks(), InvalidBlock, "state is slot ", state,
             "; use slots 1 to ", checkpoints_.num_blocks() - 1, ", or 0 for no state");
  PC_EXPECTS((length == 0) == (state == kNullBlock), ShapeError, "a prefix of ", length, " tokens with state slot ",
             state, "; a prefix needs the slot of the state after it, and no prefix needs no slot");
  if (state == kNullBlock) return;
  const std::lock_guard lock(pools_);
  PC_EXPECTS(checkpoints_.ref_count(static_cast<BlockId>(state)) > 0, DoubleFree, "state slot ", state,
             " is free; only slots with references can be shared");
}

void StateTable::check_truncate(RowSpan rows, CountSpan lengths) {
  check_idle(rows, "truncated");
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = at(rows[i]);
    const bool is_known = lengths[i] == row.length || lengths[i] == 0 ||
                          (row.checkpoint != kNullBlock && lengths[i] == row.checkpoint_length);
    PC_EXPECTS(is_known, ShapeError, "row ", rows[i], " cannot be cut to ", lengths[i], " tokens: it has states after ",
               row.checkpoint_length > 0 ? concat("0, ", row.checkpoint_length, " and ", row.length)
                                         : concat("0 and ", row.length),
               "; use resume_length() and compute the tokens after it again");
  }
}

void StateTable::check_reorder(RowSpan rows, RowSpan parents) {
  PC_EXPECTS(rows.size() == parents.size(), ShapeError, parents.size(), " parents are given for ", rows.size(),
             " rows; give one for each");
  for (const RowId parent : parents) {
    PC_EXPECTS(!used(parent).in_flight, InvalidSequence, "row ", parent,
               " cannot be a parent while a step of it is in flight; commit or abandon the step first");
  }
  check_idle(rows, "reordered");
  saved_.reserve(rows.size());
}

TokenCount StateTable::resume_length(RowId row, TokenCount length) const {
  const Row& entry = used(row);
  if (entry.length <= length) return entry.length;
  return entry.checkpoint != kNullBlock && entry.checkpoint_length <= length ? entry.checkpoint_length : 0;
}

// Changes of rows.

void StateTable::add(RowId row, TokenCount length, BlockId state, TokenCount branch) {
  PC_ASSERT(row >= 0 && row < max_sequences_ && !at(row).is_used);
  const std::lock_guard lock(pools_);
  Row& entry = at(row);
  entry.is_used = true;
  (quantises_ ? entry.resting : entry.running) = state;
  entry.checkpoint = state;
  entry.length = entry.checkpoint_length = length;
  entry.branch = branch;
  entry.end = kNoEnd;
  share_slots(entry);
}

void StateTable::share_slots(const Row& row) {
  share(row.running);
  share_checkpoint(row.resting);
  share_checkpoint(row.checkpoint);
}

// The copy takes no references.
void StateTable::copy_slots(const Row& from, Row& to) {
  to.running = from.running;
  to.resting = from.resting;
  to.checkpoint = from.checkpoint;
  to.length = from.length;
  to.checkpoint_length = from.checkpoint_length;
  to.branch = from.branch;
  to.end = from.end;
}

void StateTable::restore(RowId row, TokenCount length, BlockId running, BlockId resting, TokenCount checkpoint_length,
                         BlockId checkpoint) {
  PC_ASSERT(resting == kNullBlock || (quantises_ && running == kNullBlock));
  PC_ASSERT(row >= 0 && row < max_sequences_ && !at(row).is_used);
  const std::lock_guard lock(pools_);
  Row& entry = at(row);
  entry.is_used = true;
  entry.running = running;
  entry.resting = resting;
  entry.checkpoint = checkpoint;
  entry.length = length;
  entry.checkpoint_length = checkpoint_length;
  entry.branch = 0;
  entry.end = kNoEnd;
  share_slots(entry);
}

void StateTable::fork(RowId row, RowId child) {
  PC_ASSERT(child >= 0 && child < max_sequences_ && !at(child).is_used);
  const std::lock_guard lock(pools_);
  at(child).is_used = true;
  copy_slots(at(row), at(child));
  share_slots(at(child));
}

void StateTable::release(Row& row) {
  if (row.in_flight) {
    const auto number = static_cast<RowId>(&row - rows_.data());
    drop_written(number, in_place_ ? 1 : 0);
    drop(row.planned);
    drop_checkpoint(row.reserved);
    end_flight(row);
  }
  drop_checkpoint(row.checkpoint);
  drop_checkpoint(row.resting);
  drop(row.spare);
  drop(row.running);
  row.length = row.checkpoint_length = row.branch = 0;
  row.end = kNoEnd;
}

void StateTable::remove(RowSpan rows) {
  const std::lock_guard lock(pools_);
  for (const RowId row : rows) {
    release(at(row));
    at(row).is_used = false;
  }
}

// New references are taken before old ones are dropped, so that no slot that stays is free in between.
void StateTable::reorder(RowSpan rows, RowSpan parents) {
  const std::lock_guard lock(pools_);
  saved_.clear();
  for (const RowId parent : parents) saved_.push_back(at(parent));
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != parents[i]) share_slots(saved_[i]);
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] == parents[i]) continue;
    Row& row = at(rows[i]);
    drop_checkpoint(row.checkpoint);
    drop_checkpoint(row.resting);
    drop(row.running);
    copy_slots(saved_[i], row);
  }
}

// Returns a row to its checkpoint, or to 0 tokens without one.
void StateTable::go_back(Row& row) {
  share_checkpoint(row.checkpoint);
  drop(row.running);
  drop_checkpoint(row.resting);
  (quantises_ ? row.resting : row.running) = row.checkpoint;
  row.length = row.checkpoint_length;
}

void StateTable::truncate(RowSpan rows, CountSpan lengths) {
  const std::lock_guard lock(pools_);
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = at(rows[i]);
    row.branch = std::min(row.branch, lengths[i]);  // the row no longer shares keys and values after that
    if (lengths[i] == row.length) continue;
    if (lengths[i] == 0) {
      release(row);
      continue;
    }
    go_back(row);
  }
}

int64_t StateTable::drop_checkpoints(RowSpan rows) {
  check_idle(rows, "stripped of its checkpoint");
  const std::lock_guard lock(pools_);
  const int64_t before = checkpoints_.num_free();
  for (const RowId row : rows) forget(at(row));
  return checkpoints_.num_free() - before;
}

int64_t StateTable::drop_all_checkpoints() {
  const std::lock_guard lock(pools_);
  const int64_t before = checkpoints_.num_free();
  for (RowId row = 0; row < max_sequences_; ++row) {
    if (at(row).is_used && !at(row).in_flight) forget(at(row));
  }
  return checkpoints_.num_free() - before;
}

void StateTable::forget_checkpoint(RowId row) {
  static_cast<void>(used(row));
  const std::lock_guard lock(pools_);
  forget(at(row));
}

// Invariants.

void StateTable::check_row(RowId row, const Row& entry) const {
  PC_ASSERT(entry.length >= 0 && entry.checkpoint_length >= 0);
  PC_ASSERT(entry.is_used || !entry.in_flight);
  PC_ASSERT(entry.running != kNullBlock || entry.resting != kNullBlock || entry.length == 0);
  PC_ASSERT(entry.running == kNullBlock || entry.resting == kNullBlock || entry.in_flight);
  PC_ASSERT(quantises_ || (entry.resting == kNullBlock && entry.reserved == kNullBlock));
  PC_ASSERT((entry.checkpoint != kNullBlock) == (entry.checkpoint_length > 0));
  PC_ASSERT(entry.checkpoint_length <= entry.length);
  PC_ASSERT(!in_place_ || entry.spare == kNullBlock);
  for (const BlockId slot : {entry.running, entry.spare, entry.planned}) {
    PC_ASSERT(slot >= kNullBlock && slot < slots_.num_blocks() && (entry.is_used || slot == kNullBlock));
  }
  for (const BlockId slot : {entry.resting, entry.checkpoint, entry.reserved}) {
    PC_ASSERT(slot >= kNullBlock && slot < checkpoints_.num_blocks() && (entry.is_used || slot == kNullBlock));
  }
  PC_ASSERT(entry.reserved == kNullBlock || (entry.in_flight && checkpoints_.ref_count(entry.reserved) == 1));
  if (!entry.in_flight) {
    PC_ASSERT(entry.planned == kNullBlock && entry.source == kNullBlock && entry.count == 0);
    return;
  }
  const size_t num = num_written(entry.count);
  for (size_t i = 0; i < num; ++i) {
    const BlockId slot = written(row)[i];
    PC_ASSERT(slot != kNullBlock && slots_.ref_count(slot) == 1);
    PC_ASSERT(!in_place_ || i > 0 || slot == entry.running);
  }
}

void StateTable::count_held(std::span<int32_t> counts, std::span<int32_t> checkpoints) const {
  if (!quantises_) checkpoints = counts;
  PC_ASSERT(std::ssize(counts) == slots_.num_blocks() && std::ssize(checkpoints) == checkpoints_.num_blocks());
  for (RowId row = 0; row < max_sequences_; ++row) {
    const Row& entry = rows_[static_cast<size_t>(row)];
    if (!entry.is_used) continue;
    for (const BlockId slot : {entry.running, entry.spare, entry.planned}) ++counts[static_cast<size_t>(slot)];
    for (const BlockId slot : {entry.resting, entry.checkpoint, entry.reserved})
      ++checkpoints[static_cast<size_t>(slot)];
    const size_t num = entry.in_flight ? num_written(entry.count) : 0;
    for (size_t i = in_place_ ? 1 : 0; i < num; ++i) ++counts[static_cast<size_t>(written(row)[i])];
  }
  counts[kNullBlock] = checkpoints[kNullBlock] = 0;
}

void StateTable::check_invariants(bool exclusive) const {
  const std::lock_guard lock(pools_);
  for (RowId row = 0; row < max_sequences_; ++row) check_row(row, rows_[static_cast<size_t>(row)]);
  std::vector<int32_t> held(static_cast<size_t>(slots_.num_blocks()));
  std::vector<int32_t> kept(static_cast<size_t>(checkpoints_.num_blocks()));
  count_held(held, kept);
  const auto check = [exclusive](const BlockPool::Transaction& pool, const std::vector<int32_t>& counts) {
    for (BlockId slot = 1; slot < pool.num_blocks(); ++slot) {
      const int32_t counted = std::max(pool.ref_count(slot), 0);
      PC_ASSERT(counts[static_cast<size_t>(slot)] <= counted);
      PC_ASSERT(!exclusive || counts[static_cast<size_t>(slot)] == counted);
    }
  };
  check(slots_, held);
  if (quantises_) check(checkpoints_, kept);
}

}  // namespace pagecore
