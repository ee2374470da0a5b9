// Block tables: the blocks that hold the tokens of each sequence, in each group of layers.
//
// A sequence is a row. A row has one length and, in each group, a list of blocks. Leading blocks can be holes (the null
// block) that a window has moved past:
//
//   block size 4, length 9, capacity 16        tokens   0..3 4..7 8...  (spare)
//   table[row] =  0 7 3 9 0 0 0 ...                      0    7    3     9
//                 hole      ^ count = 4
//
// Holes can also follow blocks that a window always sees, the sinks. Tokens that were computed elsewhere can leave
// holes after blocks, until release_before() passes them. A row can begin with blocks of more tokens than its length,
// in each group of another number: other layers have to compute these tokens again, and a step over them neither copies
// nor writes the blocks, so that its slots there are padding. Tables without groups have only lengths.
//
// I1: a used row has 0 <= length <= count * block_size in every group; an unused row has length 0 and count 0.
// I2: table entries from `count` on are null, and so are entries below `num_holes`. The null row, after the last row,
//     is all null and of length 0; padding refers to it.
// I3: every non-null entry holds one reference in the pool of its group.
// I4: a row is in free_rows_ iff it is unused.
// I5: `shared_to` of a group exceeds the length of a row only if its blocks from there to `shared_to`, a multiple of
//     every block size, were in its prefix. Truncating the row ends that.
// I6: after follow_changes(), a mirror that has received every change equals the tables and lengths.
// All or nothing: each call checks everything and allocates its scratch; only then it changes rows, tables and pools,
// with all pools locked. References are dropped by group, then by row, tail first, so that prefixes live longest.
// Cost: O(blocks touched); a step allocates only if it records more copies than any step before.
// Threads: one writer; a call locks the pools in the order of their addresses.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pagecore/index/divider.hpp"
#include "pagecore/index/pools/block_pool.hpp"
#include "pagecore/index/pools/free_list.hpp"
#include "pagecore/index/pools/pools_lock.hpp"
#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/index/slots.hpp"
#include "pagecore/index/tables/changed_entries.hpp"
#include "pagecore/index/tables/pending_copies.hpp"
#include "pagecore/index/tables/step_buffers.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

// Destination of fill(): num_rows lines of `width` blocks, `stride` apart, and num_lengths lengths. The memory is the
// caller's.
struct DenseTable {
  BlockId* blocks;
  int64_t num_rows;
  int64_t width;
  int64_t stride;
  TokenCount* lengths;
  int64_t num_lengths;
};

class BlockTables {
 public:
  using RowSpan = std::span<const RowId>;
  using CountSpan = std::span<const TokenCount>;

  // One pool and block size for each group; a pool may serve several groups. Without groups, one block size, which
  // limits the length of a row.
  BlockTables(std::vector<std::shared_ptr<BlockPool>> pools, std::vector<int64_t> block_sizes, int64_t max_sequences,
              int64_t max_blocks_per_sequence);
  ~BlockTables();
  BlockTables(const BlockTables&) = delete;
  BlockTables& operator=(const BlockTables&) = delete;

  // The row that add() or fork() will return next, or -1 if every row is used.
  [[nodiscard]] RowId next_row() const { return free_rows_.size() > 0 ? free_rows_.lowest() - 1 : -1; }
  // Adds a row that shares the blocks of `prefix`, one list for each group; an empty row for an empty prefix. `length`
  // is the number of its tokens that count as computed, by default all; every list has at least those. Without groups,
  // it is any number of tokens.
  RowId add(std::span<const std::span<const BlockId>> prefix, int64_t length = kWhole);
  static constexpr int64_t kWhole = -1;
  RowId fork(RowId row);
  void remove(RowSpan rows);
  // Gives rows[i] the contents that parents[i] had before the call.
  void reorder(RowSpan rows, RowSpan parents);

  // Checks that the rows have room for a step; returns its number of tokens.
  int64_t check_step(RowSpan rows, CountSpan counts);
  // Makes room for counts[i] more tokens in rows[i] and writes their slots, row after row, one output for each group.
  // Returns false, with nothing changed, if blocks are short.
  [[nodiscard]] bool try_extend(RowSpan rows, CountSpan counts, std::span<const SlotsOut> out);
  // try_extend() that fills all buffers of a step. `first_blocks` is empty or has an entry for each group: blocks of a
  // row before that index are neither taken nor copied. Missing blocks there are holes, and the slots of their tokens
  // are padding.
  [[nodiscard]] bool try_prepare(RowSpan rows, CountSpan counts, StepBuffers& out,
                                 std::span<const int32_t> first_blocks = {});
  // The number of blocks that try_extend(), or try_prepare() with `first_blocks`, would lack, for each group. Groups of
  // one pool are counted in order.
  void shortage(RowSpan rows, CountSpan counts, std::span<int64_t> out, std::span<const int32_t> first_blocks = {});
  // Throws OutOfBlocks with the figures of the last try_extend(), try_prepare() or shortage().
  [[noreturn]] void fail_out_of_blocks() const;

  void truncate(RowSpan rows, CountSpan lengths, bool keep_capacity);
  // Replaces whole blocks before positions[i] by holes, but not those of tokens before `first`; returns the number of
  // blocks that became free.
  int64_t release_before(RowSpan rows, int64_t group, CountSpan positions, int64_t first = 0);
  // Forgets pending copies that no longer need to run; returns the number left.
  [[nodiscard]] size_t settle_copies(int64_t group);
  // Moves all pending copies of a group to `out`, in the order in which they must run; settle_copies() counted them.
  void take_copies(int64_t group, std::span<BlockCopy> out);
  // Cuts a row to `length` tokens, of which the first `unmoved` stay where they are, and replaces the shared blocks
  // that hold the others by new blocks. Returns false, with nothing changed, if blocks are short: `missing` has the
  // number for each group. Of the groups in `replaced`, whose blocks the caller replaces right after, no block is
  // taken.
  [[nodiscard]] bool try_compact(RowId row, TokenCount unmoved, TokenCount length, std::span<int64_t> missing,
                                 std::span<const int32_t> replaced = {});
  // Replaces entry `at` of a row, which may be a hole, by a block whose reference it takes over, or by a hole. Cannot
  // fail: the row has this entry, and the block is held.
  void replace(RowId row, int64_t group, int32_t at, BlockId block);
  // Undoes the copy-on-write of a step over `rows`, which refer to the sources again. The copies are those of the last
  // take_copies() and have not run; nothing else may have changed since.
  void undo_copies(RowSpan rows, int64_t group, std::span<const BlockCopy> copies);

  // Records changed entries from now on, for a mirror that starts as zeros: one array of table(0), table(1) and so on,
  // and then the lengths.
  void follow_changes();
  // Takes up to out.size() changes since the last call, in ascending order; returns the number.
  [[nodiscard]] size_t take_changes(std::span<ChangedEntry> out);
  // Undoes take_changes(); values are ignored.
  void put_back_changes(std::span<const ChangedEntry> entries) { changed_->put_back(entries); }

  [[nodiscard]] TokenCount length(RowId row) const;
  [[nodiscard]] int64_t capacity(RowId row) const;
  [[nodiscard]] std::span<const BlockId> blocks(RowId row, int64_t group) const;
  // Writes the blocks of `rows` and up to num_lengths of their lengths, followed by null blocks and zeros.
  void fill(RowSpan rows, int64_t group, const DenseTable& out) const;

  [[nodiscard]] int64_t num_rows() const { return max_sequences_ - free_rows_.size(); }
  [[nodiscard]] int32_t max_sequences() const { return max_sequences_; }
  [[nodiscard]] int32_t max_blocks() const { return max_blocks_; }
  [[nodiscard]] size_t num_groups() const { return groups_.size(); }
  // max_sequences() + 1 rows of max_blocks() entries, and max_sequences() + 1 lengths; the null row is the last.
  [[nodiscard]] const BlockId* table(int64_t group) const;
  [[nodiscard]] const TokenCount* lengths() const { return lengths_.data(); }
  [[nodiscard]] size_t num_pending_copies() const;
  [[nodiscard]] size_t nbytes() const;

  // `exclusive`: these tables are the only holder of blocks of their pools, so that counts must be equal.
  void check_invariants(bool exclusive) const;

 private:
  struct Row {
    uint64_t seen;  // number of the last call with this row
    bool is_used;
  };
  struct BlockRun {
    int32_t count;      // blocks, holes included
    int32_t num_holes;  // leading entries known to be null
    int32_t kept = 0;   // entries [kept, passed) are known to be null, too
    int32_t passed = 0;
    TokenCount shared_to = 0;
  };
  struct Group {
    Group(size_t pool, BlockId num_blocks, TokenCount block_size, size_t num_rows, size_t max_blocks);

    size_t pool;  // in pools_
    Divider block_size;
    ZeroedArray<BlockId> table;
    ZeroedArray<BlockRun> runs;
    PendingCopies copies;
    int32_t first_taken = 0;  // of the current step: blocks of a row before this index are left alone
    // Results of the latest count_blocks():
    int64_t needed = 0;
    int64_t available = 0;   // free blocks of the pool that earlier groups leave
    int64_t num_shared = 0;  // touches of shared blocks, each at most one copy
    size_t num_takers = 0;
    std::vector<uint32_t> takers;  // indices of the rows of the call that need a block: the first num_takers entries
  };
  // Blocks of a row for the tokens of a step: [first, held) exist, [held, last) must be taken. Blocks before
  // first_taken count as existing.
  struct Touched {
    int32_t first;
    int32_t held;
    int32_t last;
  };
  struct SharedTouch {
    BlockId block;
    uint32_t group;
    auto operator<=>(const SharedTouch&) const = default;
  };

  [[nodiscard]] BlockId* entries(Group& group, RowId row) const {
    return group.table.data() + static_cast<size_t>(row) * static_cast<size_t>(max_blocks_);
  }
  [[nodiscard]] const BlockId* entries(const Group& group, RowId row) const {
    return group.table.data() + static_cast<size_t>(row) * static_cast<size_t>(max_blocks_);
  }
  [[nodiscard]] Touched touched(const Group& group, RowId row, TokenCount count, int32_t first_taken) const {
    const TokenCount length = lengths_[static_cast<size_t>(row)];
    const BlockRun& run = group.runs[static_cast<size_t>(row)];
    const int32_t first = group.block_size.floor(std::max(length, run.shared_to));
    return {std::max(first, first_taken), std::max(run.count, first_taken),
            count == 0 ? 0 : group.block_size.floor(length + count - 1) + 1};
  }
  // Marks entries [from, to) of a row as changed.
  void mark_entries(const Group& group, RowId row, int32_t from, int32_t to) {
    if (changed_ == nullptr || from >= to) return;
    const auto line = (&group - groups_.data()) * (max_sequences_ + 1) + row;
    changed_->mark_run(static_cast<int32_t>(line * max_blocks_ + from), to - from);
  }
  void mark_lengths(RowSpan rows) {
    if (changed_ == nullptr) return;
    for (const RowId row : rows) changed_->mark(static_cast<int32_t>(num_table_entries() + row));
  }
  [[nodiscard]] int64_t num_table_entries() const {
    return std::ssize(groups_) * (int64_t{max_sequences_} + 1) * max_blocks_;
  }
  [[nodiscard]] BlockPool::Transaction& pool_of(const Group& group) const { return pools_[group.pool]; }

  void check_row(RowId row) const {
    const bool is_used = row >= 0 && row < max_sequences_ && rows_[static_cast<size_t>(row)].is_used;
    if (!is_used) [[unlikely]]
      refuse_row(row);
  }
  [[noreturn, gnu::cold]] void refuse_row(RowId row) const;
  void check_rows(RowSpan rows);
  void check_group(int64_t group) const;
  void check_room(int64_t tokens, RowId row) const;
  void check_slots_out(std::span<const SlotsOut> out, int64_t num_tokens) const;
  [[nodiscard]] int64_t check_prefix(std::span<const std::span<const BlockId>> prefix, int64_t length) const;
  void check_prefix_blocks(const Group& group, std::span<const BlockId> blocks, int64_t length) const;
  void check_held(const Group& group, RowId row, int32_t from, int32_t to) const;
  void check_shareable(const Group& group, RowId row, int64_t times) const;

  void set_first_taken(std::span<const int32_t> first_blocks);
  [[nodiscard]] bool count_blocks(RowSpan rows, CountSpan counts);
  void count_upper(Group& group, RowSpan rows, CountSpan counts);
  void correct_shared(size_t pool, RowSpan rows, CountSpan counts);
  [[nodiscard]] bool divide_available();
  void take_blocks(Group& group, RowId row, TokenCount count);
  template <typename Slot>
  Slot* write_slots(const Group& group, RowId row, TokenCount length, TokenCount count, Slot* out) const;
  template <typename Slot>
  void commit_group(Group& group, RowSpan rows, CountSpan counts, Slot* slots);
  [[nodiscard]] bool try_step(RowSpan rows, CountSpan counts, std::span<const SlotsOut> out);
  void advance(RowSpan rows, CountSpan counts);
  void fill_step(RowSpan rows, CountSpan counts, StepBuffers& out) const;

  int64_t drop_blocks(Group& group, RowId row, int32_t from, int32_t to);
  void shrink(Group& group, RowId row, int32_t count);
  void check_row_left() const;
  RowId take_row(TokenCount length);
  void save_parents(RowSpan rows, RowSpan parents);
  void reorder_group(Group& group, RowSpan rows, RowSpan parents, const BlockId*& blocks, const BlockRun*& runs);

  void check_group_invariants(const Group& group) const;
  void check_references(bool exclusive) const;

  int32_t max_sequences_;
  int32_t max_blocks_;
  TokenCount max_length_;
  std::vector<std::shared_ptr<BlockPool>> owners_;  // distinct, in the order of their addresses; parallel to pools_
  mutable std::vector<BlockPool::Transaction> pools_;
  std::vector<Group> groups_;
  ZeroedArray<Row> rows_;
  ZeroedArray<TokenCount> lengths_;          // by row; a separate array because callers view it
  FreeList free_rows_;                       // row + 1, lowest first
  std::unique_ptr<ChangedEntries> changed_;  // null before follow_changes()
  uint64_t num_calls_ = 0;

  // Scratch, kept so that calls rarely allocate.
  std::vector<SharedTouch> shared_;
  std::vector<SlotsOut> slots_out_;
  std::vector<BlockId> saved_blocks_;
  std::vector<BlockRun> saved_runs_;
  std::vector<TokenCount> saved_lengths_;
};

}  // namespace pagecore
