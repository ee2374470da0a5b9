// State table: the slots of a state pool that hold the recurrent state of each row of block tables.
//
//   row   running  spare  checkpoint        the state after `length` tokens is in `running`,
//    0       4       -     9 (64 tokens)    that after `checkpoint_length` tokens in `checkpoint`
//    1       9       -     9 (64 tokens)    a fork, or a sequence that begins with a cached state: shares slots
//
// A step reads the running state and writes it again. In place, a shared slot is copied before the step and a row
// without a state gets a zeroed slot. Otherwise the step writes the spare slot and commit() swaps the two, so that
// abandoning it restores the row. A decode step of a table with drafts writes one slot for each of its tokens, and
// commit() keeps that of the last accepted token.
//
// Quantised checkpoints have a pool of slots of their own. The state of a row that begins with one, or returns to one,
// rests there: its next step takes a running slot and loads it. A step reserves a slot for the checkpoint that it
// keeps, and before commit() the owner saves the states that list_saves() names.
//
//   row   running  resting  checkpoint      slots of `resting` and `checkpoint` are those of the second pool
//    0       4        -     9 (64 tokens)
//    1       -        9     9 (64 tokens)   has the state after 64 tokens, and no running slot yet
//
// I1: slots are counted in a pool like blocks: every non-null field of a row, and every slot that a step in flight
//     writes, is one reference. In place, the first slot that a step writes is `running`, and counted once.
// I2: a row without a running slot has length 0, or a resting slot; a row without a checkpoint has checkpoint_length 0.
//     Only a row with a step in flight has both a running and a resting slot: the state that the step has loaded.
// I3: a slot that a step writes has no other reference. Slots of checkpoints are never written.
// I4: an unused row has no slots.
// All or nothing: try_reserve() takes every slot that a step needs, or none; take() and give_back() cannot fail. Calls
// named check_ throw, and the calls after them cannot fail. The owner changes rows of the block tables in between.
// Cost: O(rows of the call), and of their drafts. Threads: one writer; other holders share and free slots between its
// calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pagecore/index/pools/block_pool.hpp"
#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/index/states/state_buffers.hpp"
#include "pagecore/index/states/state_grid.hpp"
#include "pagecore/index/tables/pending_copies.hpp"
#include "pagecore/native/checks.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

// Sizes of a state table; see StateGrid. `block_size` is the least common multiple of those of the block tables.
struct StateOptions {
  int64_t chunk;
  int64_t interval;
  int64_t block_size;
  int64_t draft_tokens;
  bool in_place;
  int64_t delay = 0;
};

class StateTable {
 public:
  using RowSpan = std::span<const RowId>;
  using CountSpan = std::span<const TokenCount>;
  static constexpr TokenCount kNoEnd = INT32_MAX;

  // `checkpoints` is the pool of quantised checkpoints; null if checkpoints have slots of `slots`.
  StateTable(std::shared_ptr<BlockPool> slots, std::shared_ptr<BlockPool> checkpoints, const StateOptions& options,
             int64_t max_sequences);
  ~StateTable();
  StateTable(const StateTable&) = delete;
  StateTable& operator=(const StateTable&) = delete;

  // Rows. A row begins with a state after `length` tokens, which it shares, or without one for length 0. The block
  // tables share its keys and values up to `branch` tokens.
  void check_state(TokenCount length, int64_t state) const;
  void add(RowId row, TokenCount length, BlockId state, TokenCount branch);
  // Sets the tokens up to which an equal sequence could find the row; kNoEnd at first. A row in flight keeps its end.
  void set_end(RowId row, TokenCount end) {
    if (!used(row).in_flight) at(row).end = end;
  }
  // Begins a row with a state, running or resting, and a checkpoint, of which either may be missing (null, 0 tokens).
  void restore(RowId row, TokenCount length, BlockId running, BlockId resting, TokenCount checkpoint_length,
               BlockId checkpoint);
  // Throws unless the rows are used and distinct, and no step of theirs is in flight.
  void check_idle(RowSpan rows, const char* verb);
  void fork(RowId row, RowId child);
  void check_reorder(RowSpan rows, RowSpan parents);
  void reorder(RowSpan rows, RowSpan parents);
  void check_truncate(RowSpan rows, CountSpan lengths);
  void truncate(RowSpan rows, CountSpan lengths);
  // Throws unless the rows are used and distinct; a step of theirs may be in flight.
  void check_used(RowSpan rows);
  void remove(RowSpan rows);
  // Forgets the checkpoints of idle rows; returns the number of slots that became free.
  int64_t drop_checkpoints(RowSpan rows);
  // The same for every idle row.
  int64_t drop_all_checkpoints();
  // Forgets the checkpoint of a row, also of one whose step is in flight: abandon() then returns it to 0 tokens.
  void forget_checkpoint(RowId row);

  // A step. `lengths` has an entry for each row of the block tables. Returns false, with nothing taken, if slots are
  // short.
  [[nodiscard]] bool try_reserve(RowSpan rows, CountSpan counts, const TokenCount* lengths, const StateBuffers& out,
                                 bool keeps_checkpoints);
  // After try_reserve(): begin the step, or undo the reservation.
  void take(RowSpan rows, CountSpan counts, StateBuffers& out);
  void give_back();
  // Throws OutOfBlocks with the figures of the last try_reserve() or shortage().
  [[noreturn]] void fail_out_of_slots() const;
  // The number of slots that try_reserve() would lack, without those of quantised checkpoints.
  [[nodiscard]] int64_t shortage(RowSpan rows, CountSpan counts, const TokenCount* lengths, bool keeps_checkpoints);
  // The slots of quantised checkpoints that the last try_reserve() or shortage() lacked.
  [[nodiscard]] int64_t checkpoint_shortage() const {
    return std::max<int64_t>(needed_checkpoints_ - available_checkpoints_, 0);
  }
  // The number of slots that a step without checkpoints would lack if every idle row had lost its checkpoint, and
  // another holder its reference to each of the distinct slots in `released`. `others` slots are for rows that the
  // table does not have yet.
  [[nodiscard]] int64_t least_shortage(RowSpan rows, CountSpan counts, const TokenCount* lengths,
                                       std::span<const BlockId> released, int64_t others);

  // Throws unless a step of every row is in flight of which accepted[i] tokens can stay. Writes the lengths after it.
  void check_commit(RowSpan rows, CountSpan accepted, std::span<TokenCount> lengths);
  // Moves the slots after the accepted tokens of a tree of drafts to the front; commit() then keeps the path. `path`
  // has the indices of these tokens in the step, ascending. restore_path() undoes it.
  void select_path(RowId row, std::span<const int32_t> path);
  void restore_path(RowId row, std::span<const int32_t> path);
  // After check_commit(): writes the (slot, checkpoint) of each quantised checkpoint that commit() will keep. Their
  // number is at most that of the rows.
  void list_saves(RowSpan rows, CountSpan accepted, std::vector<BlockCopy>& out) const;
  void commit(RowSpan rows, CountSpan accepted);
  // Throws unless a step of every row is in flight. Writes the lengths after abandon() or undo().
  void check_flight(RowSpan rows, bool has_run, std::span<TokenCount> lengths);
  // Ends steps that may have run: in place, rows return to their checkpoints.
  void abandon(RowSpan rows);
  // Reverts take() of steps of which nothing has run.
  void undo(RowSpan rows);

  [[nodiscard]] TokenCount length(RowId row) const { return used(row).length; }
  [[nodiscard]] BlockId slot(RowId row) const { return used(row).running; }
  // The slot that the next step writes instead of one of the pool; null in place, and during a step.
  [[nodiscard]] BlockId spare(RowId row) const { return used(row).spare; }
  [[nodiscard]] BlockId resting(RowId row) const { return used(row).resting; }
  [[nodiscard]] BlockId checkpoint(RowId row) const { return used(row).checkpoint; }
  [[nodiscard]] TokenCount checkpoint_length(RowId row) const { return used(row).checkpoint_length; }
  // The longest length up to `length` that truncate() accepts.
  [[nodiscard]] TokenCount resume_length(RowId row, TokenCount length) const;
  [[nodiscard]] bool is_in_flight(RowId row) const { return used(row).in_flight; }
  // Tokens of the step in flight; 0 without one.
  [[nodiscard]] TokenCount step_count(RowId row) const { return used(row).count; }
  // The length at which a step from `before` tokens by `count` keeps a checkpoint; 0 for none.
  [[nodiscard]] TokenCount grid_length(TokenCount before, TokenCount count, TokenCount branch, TokenCount end) const {
    return grid_.checkpoint(before, count, branch, end);
  }
  [[nodiscard]] int32_t max_sequences() const { return max_sequences_; }
  [[nodiscard]] size_t nbytes() const { return rows_.nbytes() + written_.nbytes(); }

  // Adds the references of this table to counts[slot]; `counts` has an entry for each slot. Those of quantised
  // checkpoints are added to `checkpoints`, which is not used without them.
  void count_held(std::span<int32_t> counts, std::span<int32_t> checkpoints) const;
  // `exclusive`: this table is the only holder of slots of its pools.
  void check_invariants(bool exclusive) const;

 private:
  struct Row {
    uint64_t seen;  // number of the last call with this row
    BlockId running;
    BlockId spare;
    BlockId resting;  // slot of a quantised checkpoint that is the state after `length` tokens, or null
    BlockId checkpoint;
    TokenCount length;
    TokenCount checkpoint_length;
    TokenCount branch;
    TokenCount end;
    // Of the step in flight:
    TokenCount count;
    BlockId planned;   // slot of a checkpoint inside a prefill, or null
    BlockId source;    // slot that the step's slot was copied from, or null
    BlockId reserved;  // slot for the step's quantised checkpoint, or null
    bool is_used;
    bool in_flight;
    bool is_fresh;        // the step took a running slot, which is zeroed or loaded
    bool took_spare;      // the step took the slot that it writes
    bool has_checkpoint;  // the step keeps a checkpoint where the grid has one
  };

  // Both pools, locked together in the order of their addresses.
  class Pools {
   public:
    Pools(BlockPool& slots, BlockPool& checkpoints)
        : first_(&slots < &checkpoints ? slots : checkpoints),
          second_(&slots < &checkpoints ? checkpoints : slots),
          are_two_(&slots != &checkpoints) {}
    void lock() {
      first_.lock();
      if (are_two_) second_.lock();
    }
    void unlock() {
      if (are_two_) second_.unlock();
      first_.unlock();
    }

   private:
    BlockPool::Transaction first_;
    BlockPool::Transaction second_;
    bool are_two_;
  };

  [[nodiscard]] Row& at(RowId row) { return rows_[static_cast<size_t>(row)]; }
  [[nodiscard]] const Row& used(RowId row) const {
    const bool is_used = row >= 0 && row < max_sequences_ && rows_[static_cast<size_t>(row)].is_used;
    if (!is_used) [[unlikely]]
      refuse_row(row);
    return rows_[static_cast<size_t>(row)];
  }
  [[noreturn, gnu::cold]] void refuse_row(RowId row) const;
  [[noreturn, gnu::cold]] void refuse_partial(RowId row, TokenCount accepted, TokenCount count) const;

  // The slots that a step of `count` tokens writes: one for each token of a decode step, otherwise one.
  [[nodiscard]] size_t num_written(TokenCount count) const {
    return count > 1 && grid_.is_decode(count) ? static_cast<size_t>(count) : static_cast<size_t>(count > 0);
  }
  [[nodiscard]] BlockId* written(RowId row) {
    return written_.data() + static_cast<size_t>(row) * static_cast<size_t>(grid_.draft_tokens() + 1);
  }
  [[nodiscard]] const BlockId* written(RowId row) const { return const_cast<StateTable*>(this)->written(row); }
  // Length of the checkpoint of a step that is accepted whole; 0 for none.
  [[nodiscard]] TokenCount checkpoint_of(const Row& row, TokenCount count) const {
    return grid_.checkpoint(row.length, count, row.branch, row.end);
  }
  // Length of a checkpoint that needs a slot of its own, because the step goes on after it; 0 for none.
  [[nodiscard]] TokenCount inner_checkpoint(const Row& row, TokenCount count) const {
    if (count <= 0 || grid_.is_decode(count)) return 0;
    const TokenCount length = checkpoint_of(row, count);
    return length < row.length + count ? length : 0;
  }

  // Length of the checkpoint that a step keeps if `accepted` of its tokens stay; 0 for none.
  [[nodiscard]] TokenCount kept_length(const Row& row, TokenCount accepted) const {
    if (!row.has_checkpoint || accepted == 0) return 0;
    return accepted < row.count ? grid_.in_decode(row.length, accepted) : checkpoint_of(row, row.count);
  }

  void check_step(RowSpan rows, CountSpan counts, const TokenCount* lengths);
  template <typename Holders>
  [[nodiscard]] int64_t count_slots(RowSpan rows, CountSpan counts, bool keeps_checkpoints, const Holders& holders);
  template <typename Holders>
  [[nodiscard]] int64_t num_last_holders(RowSpan rows, CountSpan counts, const Holders& holders);
  void count_needed(RowSpan rows, CountSpan counts, bool keeps_checkpoints);
  [[nodiscard]] int64_t count_checkpoints(RowSpan rows, CountSpan counts) const;
  void take_row(RowId row, TokenCount count, StateBuffers& out);
  [[nodiscard]] BlockId next_reserved() {
    PC_ASSERT(num_taken_ < reserved_.size());
    return reserved_[num_taken_++];
  }
  [[nodiscard]] BlockId next_reserved_checkpoint() {
    PC_ASSERT(num_taken_checkpoints_ < reserved_checkpoints_.size());
    return reserved_checkpoints_[num_taken_checkpoints_++];
  }
  void fill_row(RowId row, size_t i, BlockId read, StateBuffers& out);
  void commit_row(RowId row, TokenCount accepted);
  [[nodiscard]] BlockId keep_checkpoint(Row& row, const BlockId* slots, TokenCount accepted, BlockId last);
  void share(BlockId slot) {
    if (slot != kNullBlock) slots_.share(slot);
  }
  void share_checkpoint(BlockId slot) {
    if (slot != kNullBlock) checkpoints_.share(slot);
  }
  void drop(BlockId& slot) {
    if (slot != kNullBlock) slots_.drop(slot);
    slot = kNullBlock;
  }
  void drop_checkpoint(BlockId& slot) {
    if (slot != kNullBlock) checkpoints_.drop(slot);
    slot = kNullBlock;
  }
  void forget(Row& row) {
    drop_checkpoint(row.checkpoint);
    row.checkpoint_length = 0;
  }
  void share_slots(const Row& row);
  void copy_slots(const Row& from, Row& to);
  void go_back(Row& row);
  void release(Row& row);
  void end_flight(Row& row);
  void drop_written(RowId row, size_t from);
  void check_row(RowId row, const Row& entry) const;

  std::shared_ptr<BlockPool> owner_;
  std::shared_ptr<BlockPool> owner_of_checkpoints_;
  bool quantises_;
  mutable BlockPool::Transaction slots_;
  mutable BlockPool::Transaction checkpoints_;
  mutable Pools pools_;
  StateGrid grid_;
  bool in_place_;
  int32_t max_sequences_;
  ZeroedArray<Row> rows_;
  ZeroedArray<BlockId> written_;  // 1 + draft_tokens entries of each row
  uint64_t num_calls_ = 0;
  int64_t needed_ = 0;  // of the last count_needed()
  int64_t available_ = 0;
  int64_t needed_checkpoints_ = 0;
  int64_t available_checkpoints_ = 0;
  bool keeps_checkpoints_ = false;

  // Scratch, kept so that calls rarely allocate.
  std::vector<BlockId> reserved_;
  size_t num_taken_ = 0;  // of reserved_
  std::vector<BlockId> reserved_checkpoints_;
  size_t num_taken_checkpoints_ = 0;  // of reserved_checkpoints_
  std::vector<BlockId> shared_;
  std::vector<int32_t> holders_;
  std::vector<Row> saved_;
};

}  // namespace pagecore
