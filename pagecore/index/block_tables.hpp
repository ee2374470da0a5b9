// Which blocks hold the tokens of each sequence, in each group of layers.
//
// A sequence is a row. It has one length; in each group it has a run of blocks, of which the leading ones may be holes
// (the null block: a window has moved past them):
//
//   block size 4, length 9, capacity 16        tokens   0..3 4..7 8...  (spare)
//   table[row] =  0 7 3 9 0 0 0 ...                      0    7    3     9
//                 hole      ^ count = 4
//
// Tokens that were computed elsewhere may leave holes behind blocks, too, until release_before() passes them.
//
// I1: a row in use has 0 <= length <= count * block_size in every group; a row not in use has length 0 and count 0.
// I2: table entries from `count` on are null; entries below `num_holes` are null too. The null row, behind the last, is
//     all null and of length 0: padding points at it.
// I3: every entry that is not null holds one reference in the group's pool.
// I4: a row is in free_rows_ iff it is not in use.
// I5: once changes are followed, a copy of tables and lengths that is given every change equals them whenever none is
//     left to take.
// All or nothing: each call checks everything, makes its scratch, and only then changes rows, tables and pools, with
// all pools locked. References are dropped group after group, row after row, and tail first: a prefix lives longest.
// Cost: O(blocks touched); a step allocates nothing, unless it records more copies than ever before.
// Threads: one writer; the pools are locked, in the order of their addresses, for the length of a call.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pagecore/index/block_pool.hpp"
#include "pagecore/index/changed_entries.hpp"
#include "pagecore/index/divider.hpp"
#include "pagecore/index/free_list.hpp"
#include "pagecore/index/pending_copies.hpp"
#include "pagecore/index/pools_lock.hpp"
#include "pagecore/index/slots.hpp"
#include "pagecore/index/step_buffers.hpp"
#include "pagecore/index/zeroed_array.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

// A block table of the caller: num_rows lines of `width` blocks, `stride` apart, and num_lengths lengths.
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
  using Rows = std::span<const RowId>;
  using Counts = std::span<const TokenCount>;

  // One pool and block size for each group; a pool may serve several.
  BlockTables(std::vector<std::shared_ptr<BlockPool>> pools, std::vector<int64_t> block_sizes, int64_t max_sequences,
              int64_t max_blocks_per_sequence);
  ~BlockTables();
  BlockTables(const BlockTables&) = delete;
  BlockTables& operator=(const BlockTables&) = delete;

  // The row that add() and fork() return next, or -1 where all are in use.
  [[nodiscard]] RowId next_row() const { return free_rows_.size() > 0 ? free_rows_.lowest() - 1 : -1; }
  // A row that shares the blocks of `prefix`, one list for each group, or an empty row where there is none.
  RowId add(std::span<const std::span<const BlockId>> prefix);
  RowId fork(RowId row);
  void remove(Rows rows);
  // rows[i] becomes what parents[i] was before the call.
  void reorder(Rows rows, Rows parents);

  // Tokens of a step, which must be one that the rows have room for.
  int64_t check_step(Rows rows, Counts counts);
  // Makes room for counts[i] more tokens of rows[i] and writes their slots, row after row, one output for each group.
  // Returns false, with nothing changed, when blocks are short.
  [[nodiscard]] bool try_extend(Rows rows, Counts counts, std::span<const SlotsOut> out);
  // The same, with everything else that a step needs. `first_blocks` has an entry for each group, or none: no block is
  // taken or copied before that block of a row. Missing blocks there are holes, and the slots of the tokens are
  // padding.
  [[nodiscard]] bool try_prepare(Rows rows, Counts counts, StepBuffers& out,
                                 std::span<const int32_t> first_blocks = {});
  // Blocks that try_extend, or try_prepare with the same `first_blocks`, would lack; out has one entry for each group.
  // Groups of one pool are served in their order.
  void shortage(Rows rows, Counts counts, std::span<int64_t> out, std::span<const int32_t> first_blocks = {});
  // Throws OutOfBlocks with the figures of the try_ or shortage that came last.
  [[noreturn]] void fail_out_of_blocks() const;

  void truncate(Rows rows, Counts lengths, bool keep_capacity);
  // Whole blocks before positions[i] become holes; returns how many blocks became free.
  int64_t release_before(Rows rows, int64_t group, Counts positions);
  // Forgets copies that copy-on-write promised and that need not run any more; returns how many are left.
  [[nodiscard]] size_t settle_copies(int64_t group);
  // Hands over all pending copies of a group, in the order in which they must run; settle_copies() counted them.
  void take_copies(int64_t group, std::span<BlockCopy> out);
  // Undoes copy-on-write of a step that `rows` are in: they hold the sources again. For copies that the last
  // take_copies gave and nobody has run; nothing else may have changed since.
  void undo_copies(Rows rows, int64_t group, std::span<const BlockCopy> copies);

  // Follows from now on which entries change, for a copy that lives elsewhere and begins as all zeros. Its entries are
  // those of table(0), of table(1) and so on, and then the lengths: all in one array.
  void follow_changes();
  // Takes changes since the last call, ascending, as many as there are or `out` has room for.
  [[nodiscard]] size_t take_changes(std::span<ChangedEntry> out);
  // Undoes take_changes(); the values are not looked at.
  void put_back_changes(std::span<const ChangedEntry> entries) { changed_->put_back(entries); }

  [[nodiscard]] TokenCount length(RowId row) const;
  [[nodiscard]] int64_t capacity(RowId row) const;
  [[nodiscard]] std::span<const BlockId> blocks(RowId row, int64_t group) const;
  // Writes the blocks of `rows` and, as far as there is room for them, their lengths; null blocks and zeros behind
  // them.
  void fill(Rows rows, int64_t group, const DenseTable& out) const;

  [[nodiscard]] int64_t num_rows() const { return max_sequences_ - free_rows_.size(); }
  [[nodiscard]] int32_t max_sequences() const { return max_sequences_; }
  [[nodiscard]] int32_t max_blocks() const { return max_blocks_; }
  [[nodiscard]] size_t num_groups() const { return groups_.size(); }
  // max_sequences() + 1 rows of max_blocks() entries, and as many lengths: the null row is the last.
  [[nodiscard]] const BlockId* table(int64_t group) const;
  [[nodiscard]] const TokenCount* lengths() const { return lengths_.data(); }
  [[nodiscard]] size_t num_pending_copies() const;
  [[nodiscard]] size_t nbytes() const;

  // `exclusive`: nobody else holds blocks of these pools, so that their counts can be compared exactly.
  void check_invariants(bool exclusive) const;

 private:
  struct Row {
    uint64_t seen;  // number of the last call that named it
    bool is_used;
  };
  struct Run {
    int32_t count;      // blocks, holes included
    int32_t num_holes;  // leading entries known to be null
  };
  struct Group {
    Group(size_t pool, BlockId num_blocks, TokenCount block_size, size_t num_rows, size_t max_blocks);

    size_t pool;  // in pools_
    Divider block_size;
    ZeroedArray<BlockId> table;
    ZeroedArray<Run> runs;
    PendingCopies copies;
    int32_t first_taken = 0;  // of the step that is being counted or taken: it leaves the blocks before this one alone
    // Of the latest count_blocks():
    int64_t needed = 0;
    int64_t available = 0;   // what the groups before left of the pool
    int64_t num_shared = 0;  // touches of blocks with other holders, each a copy at most
    size_t num_takers = 0;
    std::vector<uint32_t> takers;  // which of the call's rows need a block, the first num_takers of them
  };
  // Blocks [first, held) of a row exist, [held, last) must be made, for the tokens of a step. Blocks before first_taken
  // count as held.
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
    const int32_t held = group.runs[static_cast<size_t>(row)].count;
    return {std::max(group.block_size.floor(length), first_taken), std::max(held, first_taken),
            count == 0 ? 0 : group.block_size.floor(length + count - 1) + 1};
  }
  // Entries [from, to) of a row have changed.
  void mark_entries(const Group& group, RowId row, int32_t from, int32_t to) {
    if (changed_ == nullptr || from >= to) return;
    const auto line = (&group - groups_.data()) * (max_sequences_ + 1) + row;
    changed_->mark_run(static_cast<int32_t>(line * max_blocks_ + from), to - from);
  }
  void mark_lengths(Rows rows) {
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
  void check_rows(Rows rows);
  void check_group(int64_t group) const;
  void check_room(int64_t tokens, RowId row) const;
  void check_slots_out(std::span<const SlotsOut> out, int64_t num_tokens) const;
  [[nodiscard]] int64_t check_prefix(std::span<const std::span<const BlockId>> prefix) const;
  void check_prefix_blocks(const Group& group, std::span<const BlockId> blocks) const;
  void check_held(const Group& group, RowId row, int32_t from, int32_t to) const;
  void check_shareable(const Group& group, RowId row, int64_t times) const;

  void set_first_taken(std::span<const int32_t> first_blocks);
  [[nodiscard]] bool count_blocks(Rows rows, Counts counts);
  void count_upper(Group& group, Rows rows, Counts counts);
  void correct_shared(size_t pool, Rows rows, Counts counts);
  [[nodiscard]] bool divide_available();
  void take_blocks(Group& group, RowId row, TokenCount count);
  template <typename Slot>
  Slot* write_slots(const Group& group, RowId row, TokenCount length, TokenCount count, Slot* out) const;
  template <typename Slot>
  void commit_group(Group& group, Rows rows, Counts counts, Slot* slots);
  [[nodiscard]] bool try_step(Rows rows, Counts counts, std::span<const SlotsOut> out);
  void advance(Rows rows, Counts counts);
  void fill_step(Rows rows, Counts counts, StepBuffers& out) const;

  int64_t drop_blocks(Group& group, RowId row, int32_t from, int32_t to);
  void shrink(Group& group, RowId row, int32_t count);
  void check_row_left() const;
  RowId take_row(TokenCount length);
  void save_parents(Rows rows, Rows parents);
  void reorder_group(Group& group, Rows rows, Rows parents, const BlockId*& blocks, const Run*& runs);

  void check_group_invariants(const Group& group) const;
  void check_references(bool exclusive) const;

  int32_t max_sequences_;
  int32_t max_blocks_;
  TokenCount max_length_;
  std::vector<std::shared_ptr<BlockPool>> owners_;  // distinct, in the order of their addresses, as pools_
  mutable std::vector<BlockPool::Transaction> pools_;
  std::vector<Group> groups_;
  ZeroedArray<Row> rows_;
  ZeroedArray<TokenCount> lengths_;          // of the rows; for callers too, so that it is an array of its own
  FreeList free_rows_;                       // row + 1, lowest first
  std::unique_ptr<ChangedEntries> changed_;  // null where nobody follows
  uint64_t num_calls_ = 0;

  // Scratch, kept so that calls seldom allocate.
  std::vector<SharedTouch> shared_;
  std::vector<SlotsOut> slots_out_;
  std::vector<BlockId> saved_blocks_;
  std::vector<Run> saved_runs_;
  std::vector<TokenCount> saved_lengths_;
};

}  // namespace pagecore
