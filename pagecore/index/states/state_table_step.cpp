// A step over state slots: reserve, take, then commit, abandon or undo.
//
// try_reserve() counts the slots that take() will take, in the order in which it visits the rows, and takes them from
// the pool at once, and those of quantised checkpoints from theirs. In place, a row copies its state if another holder
// shares the slot; of several rows that share a slot with no other holder, the last one writes in place.
#include <algorithm>
#include <mutex>
#include <utility>

#include "pagecore/index/states/state_table.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore {

// Counting.

void StateTable::check_step(RowSpan rows, CountSpan counts, const TokenCount* lengths) {
  PC_EXPECTS(rows.size() == counts.size(), ShapeError, counts.size(), " counts are given for ", rows.size(),
             " rows; give one for each, or one for all");
  check_idle(rows, "prepared");
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = at(rows[i]);
    PC_EXPECTS(counts[i] >= 0 && counts[i] <= INT32_MAX - row.length, ShapeError, "row ", rows[i],
               " cannot be extended by ", counts[i], " tokens; use 0 to ", INT32_MAX - row.length);
    PC_EXPECTS(lengths[rows[i]] == row.length, InvalidSequence, "row ", rows[i], " has ", lengths[rows[i]],
               " tokens in the block tables and a state after ", row.length,
               "; change its row through the state table, or cut it to the state's length");
  }
}

// The number of slots that a step needs, where holders(slot) is the number of references to a slot.
template <typename Holders>
int64_t StateTable::count_slots(RowSpan rows, CountSpan counts, bool keeps_checkpoints, const Holders& holders) {
  int64_t needed = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = at(rows[i]);
    if (counts[i] == 0) continue;
    needed += static_cast<int64_t>(num_written(counts[i])) - 1;
    needed += keeps_checkpoints && inner_checkpoint(row, counts[i]) > 0;
    if (in_place_) {
      needed += row.running == kNullBlock || holders(row.running) > 1;
    } else {
      needed += (row.running == kNullBlock) + (row.spare == kNullBlock);
    }
  }
  return in_place_ && needed > 0 ? needed - num_last_holders(rows, counts, holders) : needed;
}

// Every touch of a shared slot counts as a copy, but if all holders of a slot are rows of the step, the last one writes
// in place. Returns the number of these slots.
template <typename Holders>
int64_t StateTable::num_last_holders(RowSpan rows, CountSpan counts, const Holders& holders) {
  shared_.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    const BlockId slot = at(rows[i]).running;
    if (counts[i] > 0 && slot != kNullBlock && holders(slot) > 1) shared_.push_back(slot);
  }
  std::sort(shared_.begin(), shared_.end());
  int32_t touches = 0;
  int64_t last_holders = 0;
  for (size_t i = 0; i < shared_.size(); ++i) {
    touches = i > 0 && shared_[i - 1] == shared_[i] ? touches + 1 : 1;
    last_holders += touches == holders(shared_[i]);
  }
  return last_holders;
}

void StateTable::count_needed(RowSpan rows, CountSpan counts, bool keeps_checkpoints) {
  keeps_checkpoints_ = keeps_checkpoints;
  available_ = slots_.num_free();
  needed_ = count_slots(rows, counts, keeps_checkpoints, [this](BlockId slot) { return slots_.ref_count(slot); });
  needed_checkpoints_ = keeps_checkpoints && quantises_ ? count_checkpoints(rows, counts) : 0;
  available_checkpoints_ = checkpoints_.num_free();
}

// The number of quantised checkpoints that a step may keep.
int64_t StateTable::count_checkpoints(RowSpan rows, CountSpan counts) const {
  int64_t needed = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows_[static_cast<size_t>(rows[i])];
    needed += counts[i] > 0 && checkpoint_of(row, counts[i]) > 0;
  }
  return needed;
}

int64_t StateTable::shortage(RowSpan rows, CountSpan counts, const TokenCount* lengths, bool keeps_checkpoints) {
  check_step(rows, counts, lengths);
  shared_.reserve(rows.size());
  const std::lock_guard lock(pools_);
  count_needed(rows, counts, keeps_checkpoints);
  return std::max<int64_t>(needed_ - available_, 0);
}

int64_t StateTable::least_shortage(RowSpan rows, CountSpan counts, const TokenCount* lengths,
                                   std::span<const BlockId> released, int64_t others) {
  check_step(rows, counts, lengths);
  shared_.reserve(rows.size());
  holders_.resize(static_cast<size_t>(slots_.num_blocks()));
  const std::lock_guard lock(pools_);
  // Resets the null slot, too: rows without a checkpoint decrement it below.
  for (BlockId slot = kNullBlock; slot < slots_.num_blocks(); ++slot)
    holders_[static_cast<size_t>(slot)] = std::max(slots_.ref_count(slot), 0);
  if (!quantises_) {  // quantised checkpoints have no slots that a step could take
    for (const BlockId slot : released) --holders_[static_cast<size_t>(slot)];
    for (RowId row = 0; row < max_sequences_; ++row) {
      if (at(row).is_used && !at(row).in_flight) --holders_[static_cast<size_t>(at(row).checkpoint)];
    }
  }
  available_ = std::count(holders_.begin() + 1, holders_.end(), 0);
  needed_ =
      others + count_slots(rows, counts, false, [this](BlockId slot) { return holders_[static_cast<size_t>(slot)]; });
  return std::max<int64_t>(needed_ - available_, 0);
}

bool StateTable::try_reserve(RowSpan rows, CountSpan counts, const TokenCount* lengths, const StateBuffers& out,
                             bool keeps_checkpoints) {
  PC_EXPECTS(rows.size() <= static_cast<size_t>(out.max_sequences()), ShapeError, "the step has ", rows.size(),
             " sequences; the state buffers have room for ", out.max_sequences());
  PC_EXPECTS(out.draft_tokens() == grid_.draft_tokens(), ShapeError, "the state buffers are for ", out.draft_tokens(),
             " draft tokens and the table for ", grid_.draft_tokens(), "; use equal numbers");
  check_step(rows, counts, lengths);
  shared_.reserve(rows.size());
  const std::lock_guard lock(pools_);
  count_needed(rows, counts, keeps_checkpoints);
  if (needed_ > available_ || needed_checkpoints_ > available_checkpoints_) return false;
  reserved_.resize(static_cast<size_t>(needed_));
  reserved_checkpoints_.resize(static_cast<size_t>(needed_checkpoints_));
  slots_.take(reserved_);
  checkpoints_.take(reserved_checkpoints_);
  return true;
}

// In reverse order, so that the pool's stack is as before.
void StateTable::give_back() {
  const std::lock_guard lock(pools_);
  for (size_t i = reserved_.size(); i-- > 0;) slots_.drop(reserved_[i]);
  for (size_t i = reserved_checkpoints_.size(); i-- > 0;) checkpoints_.drop(reserved_checkpoints_[i]);
  reserved_.clear();
  reserved_checkpoints_.clear();
}

void StateTable::fail_out_of_slots() const {
  if (needed_ <= available_ && checkpoint_shortage() > 0) {
    throw Error(concat(needed_checkpoints_, " slots of quantised checkpoints are needed and ", available_checkpoints_,
                       " are free; prepare without checkpoints, drop checkpoints or make num_checkpoints larger"),
                {needed_checkpoints_}, {available_checkpoints_});
  }
  throw Error(concat(needed_, " state slots are needed and ", available_,
                     " are free; remove a row, drop checkpoints or make num_slots larger"),
              {needed_}, {available_});
}

// Taking.

void StateTable::take(RowSpan rows, CountSpan counts, StateBuffers& out) {
  const std::lock_guard lock(pools_);
  num_taken_ = num_taken_checkpoints_ = 0;
  out.begin(static_cast<int32_t>(rows.size()));
  for (size_t i = 0; i < rows.size(); ++i) {
    take_row(rows[i], counts[i], out);
    if (counts[i] > 0) fill_row(rows[i], i, at(rows[i]).running, out);
  }
  PC_ASSERT(num_taken_ == reserved_.size() && num_taken_checkpoints_ == reserved_checkpoints_.size());
  reserved_.clear();
  reserved_checkpoints_.clear();
}

void StateTable::take_row(RowId number, TokenCount count, StateBuffers& out) {
  Row& row = at(number);
  row.in_flight = true;
  row.count = count;
  row.has_checkpoint = keeps_checkpoints_;
  if (count == 0) return;
  BlockId* slots = written(number);
  if (row.running == kNullBlock) {
    row.running = next_reserved();
    row.is_fresh = true;
    if (row.resting == kNullBlock) {
      out.add_zero(row.running);
    } else {
      out.add_load({row.resting, row.running});
    }
  } else if (in_place_ && slots_.ref_count(row.running) > 1) {
    row.source = row.running;
    row.running = next_reserved();
    slots_.drop(row.source);
    out.add_copy({row.source, row.running});
  }
  if (in_place_) {
    slots[0] = row.running;
  } else {
    row.took_spare = row.spare == kNullBlock;
    slots[0] = row.took_spare ? next_reserved() : row.spare;
    row.spare = kNullBlock;
  }
  const size_t num = num_written(count);
  for (size_t i = 1; i < num; ++i) slots[i] = next_reserved();
  if (!keeps_checkpoints_) return;
  if (inner_checkpoint(row, count) > 0) row.planned = next_reserved();
  if (quantises_ && checkpoint_of(row, count) > 0) row.reserved = next_reserved_checkpoint();
}

void StateTable::fill_row(RowId number, size_t i, BlockId read, StateBuffers& out) {
  const Row& row = at(number);
  const BlockId* slots = written(number);
  const size_t num = num_written(row.count);
  out.state_read()[i] = read;
  out.state_write()[i] = slots[num - 1];
  if (out.draft_write(i) != nullptr && grid_.is_decode(row.count)) {
    std::copy_n(slots, num, out.draft_write(i));
    out.draft_read(i)[0] = read;
    std::copy_n(slots, num - 1, out.draft_read(i) + 1);
  }
  const TokenCount kept = row.has_checkpoint ? checkpoint_of(row, row.count) : 0;
  if (kept == 0) return;
  out.checkpoint_lengths()[i] = kept;
  if (row.planned != kNullBlock) {
    out.checkpoint_write()[i] = row.planned;
  } else {  // the state after the step, or after one of its tokens
    out.checkpoint_write()[i] = num > 1 ? slots[kept - row.length - 1] : slots[0];
  }
}

// Ending.

void StateTable::end_flight(Row& row) {
  row.in_flight = row.is_fresh = row.took_spare = row.has_checkpoint = false;
  row.count = 0;
  row.source = kNullBlock;
}

void StateTable::drop_written(RowId row, size_t from) {
  BlockId* slots = written(row);
  for (size_t i = num_written(at(row).count); i-- > from;) drop(slots[i]);
}

void StateTable::refuse_partial(RowId row, TokenCount accepted, TokenCount count) const {
  fail(ErrorKind::UnsupportedOption, accepted, " of ", count, " tokens of row ", row,
       " are accepted, but it has no state after them: ",
       grid_.is_decode(count) ? "in place, the first token of a step must be accepted; abandon the step instead"
                              : "only steps of up to 1 + draft_tokens tokens can be accepted in part; accept all, "
                                "abandon the step, or make the table with more draft_tokens");
}

void StateTable::check_commit(RowSpan rows, CountSpan accepted, std::span<TokenCount> lengths) {
  PC_EXPECTS(rows.size() == accepted.size(), ShapeError, accepted.size(), " accepted counts are given for ",
             rows.size(), " rows; give one for each, or one for all");
  check_flight(rows, true, lengths);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = at(rows[i]);
    PC_EXPECTS(accepted[i] >= 0 && accepted[i] <= row.count, ShapeError, accepted[i], " tokens of row ", rows[i],
               " are accepted; its step has ", row.count, ", use 0 to ", row.count);
    const bool is_known = accepted[i] == row.count || (accepted[i] > 0 ? grid_.is_decode(row.count) : !in_place_);
    if (!is_known) refuse_partial(rows[i], accepted[i], row.count);
    lengths[i] = row.length + accepted[i];
  }
}

void StateTable::check_flight(RowSpan rows, bool has_run, std::span<TokenCount> lengths) {
  check_used(rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = at(rows[i]);
    PC_EXPECTS(row.in_flight, InvalidSequence, "row ", rows[i], " has no step in flight; prepare one first");
    // A state that the step has loaded is still in its checkpoint.
    const bool is_lost = has_run && in_place_ && row.count > 0 && row.resting == kNullBlock;
    lengths[i] = is_lost ? row.checkpoint_length : row.length;
  }
}

void StateTable::list_saves(RowSpan rows, CountSpan accepted, std::vector<BlockCopy>& out) const {
  out.clear();
  if (!quantises_) return;
  out.reserve(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows_[static_cast<size_t>(rows[i])];
    const TokenCount length = row.count > 0 ? kept_length(row, accepted[i]) : 0;
    if (length == 0) continue;
    const bool has_drafts = num_written(row.count) > 1;
    const BlockId at_token = written(rows[i])[has_drafts ? static_cast<size_t>(length - row.length - 1) : 0];
    out.push_back({row.planned != kNullBlock ? row.planned : at_token, row.reserved});
  }
}

void StateTable::select_path(RowId row, std::span<const int32_t> path) {
  BlockId* slots = written(row);
  for (size_t i = 0; i < path.size(); ++i) std::swap(slots[i], slots[path[i]]);
}

void StateTable::restore_path(RowId row, std::span<const int32_t> path) {
  BlockId* slots = written(row);
  for (size_t i = path.size(); i-- > 0;) std::swap(slots[i], slots[path[i]]);
}

void StateTable::commit(RowSpan rows, CountSpan accepted) {
  const std::lock_guard lock(pools_);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (at(rows[i]).count > 0) commit_row(rows[i], accepted[i]);
    end_flight(at(rows[i]));
  }
}

void StateTable::commit_row(RowId number, TokenCount accepted) {
  Row& row = at(number);
  BlockId* slots = written(number);
  const size_t num = num_written(row.count);
  const size_t kept = accepted == 0 ? num : num == 1 ? 0 : static_cast<size_t>(accepted) - 1;  // num: none
  BlockId before = in_place_ ? kNullBlock : row.running;
  if (kept < num) row.running = slots[kept];
  const BlockId of_checkpoint = keep_checkpoint(row, slots, accepted, row.running);
  row.length += accepted;
  if (accepted < row.count) row.branch = std::min(row.branch, row.length);
  if (kept == num) before = kNullBlock;
  if (kept < num) slots[kept] = kNullBlock;
  for (size_t i = 0; i < num; ++i) {
    if (slots[i] == of_checkpoint) slots[i] = kNullBlock;
  }
  if (before != kNullBlock && slots_.ref_count(before) == 1) {
    row.spare = before;  // no other holder: the next step writes it
  } else {
    drop(before);
    for (size_t i = 0; i < num && !in_place_ && row.spare == kNullBlock; ++i) std::swap(row.spare, slots[i]);
  }
  for (size_t i = num; i-- > 0;) drop(slots[i]);
  drop(row.planned);
  drop_checkpoint(row.resting);
  drop_checkpoint(row.reserved);
}

// Replaces the checkpoint by that of the step, if it has one among the accepted tokens; returns its slot. `last` is the
// running slot after the step, which a checkpoint at the end of the step shares. A quantised checkpoint has the
// reserved slot, and leaves those of the step as they are.
BlockId StateTable::keep_checkpoint(Row& row, const BlockId* slots, TokenCount accepted, BlockId last) {
  const TokenCount length = kept_length(row, accepted);
  if (length == 0) return kNullBlock;
  BlockId slot = kNullBlock;
  if (quantises_) {
    slot = std::exchange(row.reserved, kNullBlock);
  } else if (length == row.length + accepted) {
    slot = last;
    slots_.share(last);
  } else {
    slot = grid_.is_decode(row.count) ? slots[length - row.length - 1] : row.planned;
    row.planned = kNullBlock;
  }
  drop_checkpoint(row.checkpoint);
  row.checkpoint = slot;
  row.checkpoint_length = length;
  return quantises_ ? kNullBlock : slot;
}

void StateTable::abandon(RowSpan rows) {
  const std::lock_guard lock(pools_);
  for (const RowId number : rows) {
    Row& row = at(number);
    if (row.count > 0) {
      drop(row.planned);
      drop_checkpoint(row.reserved);
      drop_written(number, 1);
      if (!in_place_) {
        std::swap(row.spare, written(number)[0]);
        drop_checkpoint(row.resting);  // the running slot has the loaded state
      } else if (row.resting != kNullBlock) {
        drop(row.running);
      } else {
        go_back(row);
      }
    }
    row.branch = std::min(row.branch, row.length);
    end_flight(row);
  }
}

void StateTable::undo(RowSpan rows) {
  const std::lock_guard lock(pools_);
  for (size_t i = rows.size(); i-- > 0;) {
    Row& row = at(rows[i]);
    if (row.count > 0) {
      drop(row.planned);
      drop_checkpoint(row.reserved);
      drop_written(rows[i], 1);
      if (!in_place_) {
        std::swap(row.spare, written(rows[i])[0]);
        if (row.took_spare) drop(row.spare);
      }
      if (row.is_fresh || row.source != kNullBlock) {
        share(row.source);
        drop(row.running);
        row.running = row.source;
      }
    }
    row.branch = std::min(row.branch, row.length);
    end_flight(row);
  }
}

}  // namespace pagecore
