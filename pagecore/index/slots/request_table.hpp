// Request table: the slots of the tokens of each request, for engines that keep one table of slots for all requests.
//
//   max_context 6        table[row] = 42 17 88 5 9 0      length 5: one past the last position written
//
// I1: an unused row has length 0; a used row has 0 <= length <= max_context.
// I2: entries from the length of a row on are 0, and so are entries that no write has covered.
// I3: a row is in free_rows_ iff it is unused.
// States: free -> used (allocate) -> free (free), which zeroes what was written.
// All or nothing: each call checks the whole batch before it changes a row.
// Cost: O(rows + slots). Memory: committed as rows are first written. Threads: one writer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pagecore/index/pools/free_list.hpp"
#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/index/slots.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

class RequestTable {
 public:
  using RowSpan = std::span<const RowId>;
  using CountSpan = std::span<const TokenCount>;
  using SlotSpan = std::span<const SlotId>;

  RequestTable(int64_t num_requests, int64_t max_context, SlotType type);
  RequestTable(const RequestTable&) = delete;
  RequestTable& operator=(const RequestTable&) = delete;

  // Takes out.size() rows, lowest first; returns false, with none taken, if fewer are free.
  [[nodiscard]] bool try_allocate(std::span<RowId> out);
  void free(RowSpan rows);

  // Writes the next counts[i] slots to rows[i] from position starts[i] on, for each i in order; rows may repeat.
  void write(RowSpan rows, CountSpan starts, CountSpan counts, SlotSpan slots);
  // Copies entries [start, stop) of a row to `out`, an array of the element type of the table.
  void read(RowId row, int64_t start, int64_t stop, void* out) const;
  // Throws unless [start, stop) lies within a used row.
  void check_range(RowId row, int64_t start, int64_t stop) const;
  [[nodiscard]] TokenCount length(RowId row) const;

  [[nodiscard]] RowId num_requests() const { return num_requests_; }
  [[nodiscard]] TokenCount max_context() const { return max_context_; }
  [[nodiscard]] RowId num_free() const { return free_rows_.size(); }
  [[nodiscard]] RowId num_used() const { return num_requests_ - free_rows_.size(); }
  [[nodiscard]] SlotType type() const { return type_; }
  [[nodiscard]] void* table() { return is_wide() ? static_cast<void*>(wide_.data()) : narrow_.data(); }
  [[nodiscard]] size_t nbytes() const;
  void check_invariants() const;

 private:
  struct Piece {
    RowId row;
    TokenCount start;
    TokenCount count;
  };

  [[nodiscard]] bool is_wide() const { return type_ == SlotType::Int64; }
  [[nodiscard]] size_t num_entries() const {
    return static_cast<size_t>(num_requests_) * static_cast<size_t>(max_context_);
  }
  [[nodiscard]] size_t at(RowId row, int64_t position) const {
    return static_cast<size_t>(row) * static_cast<size_t>(max_context_) + static_cast<size_t>(position);
  }
  [[nodiscard]] bool is_used(RowId row) const {
    return row >= 0 && row < num_requests_ && is_used_[static_cast<size_t>(row)];
  }
  void check_row(RowId row) const;
  [[noreturn, gnu::cold]] void refuse_free(RowId row) const;
  void check_fit(SlotSpan slots) const;
  void plan_pieces(RowSpan rows, CountSpan starts, CountSpan counts, size_t num_slots);
  template <typename Slot>
  void write_pieces(Slot* table, const SlotId* slots);
  template <typename Slot>
  void clear(Slot* table, RowId row);
  template <typename Slot>
  void check_zeros(const Slot* table) const;

  RowId num_requests_;
  TokenCount max_context_;
  SlotType type_;
  ZeroedArray<int32_t> narrow_;  // the table; one of the two is empty
  ZeroedArray<int64_t> wide_;
  ZeroedArray<TokenCount> lengths_;
  ZeroedArray<uint8_t> is_used_;
  FreeList free_rows_;         // row + 1, lowest first
  std::vector<Piece> pieces_;  // scratch, kept so that writes rarely allocate
};

}  // namespace pagecore
