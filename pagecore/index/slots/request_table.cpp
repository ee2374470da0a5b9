#include "pagecore/index/slots/request_table.hpp"

#include <algorithm>
#include <limits>

#include "pagecore/index/sizes.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore {
namespace {

// Non-zero iff a slot does not fit int32.
uint64_t beyond_int32(SlotId slot) { return (static_cast<uint64_t>(slot) + (uint64_t{1} << 31)) >> 32; }

}  // namespace

RequestTable::RequestTable(int64_t num_requests, int64_t max_context, SlotType type)
    : num_requests_(checked_size("num_requests", num_requests, 1, kMaxInt32 - 1)),
      max_context_(checked_size("max_context", max_context, 1, kMaxInt32)),
      type_(type),
      narrow_(is_wide() ? 0 : num_entries()),
      wide_(is_wide() ? num_entries() : 0),
      lengths_(static_cast<size_t>(num_requests_)),
      is_used_(static_cast<size_t>(num_requests_)),
      free_rows_(num_requests_ + 1, Order::Address) {}

// Rows.

bool RequestTable::try_allocate(std::span<RowId> out) {
  if (out.size() > static_cast<size_t>(num_free())) return false;
  free_rows_.take(out);
  for (RowId& row : out) is_used_[static_cast<size_t>(--row)] = true;
  return true;
}

void RequestTable::free(RowSpan rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!is_used(rows[i])) [[unlikely]] {
      for (const RowId row : rows.first(i)) is_used_[static_cast<size_t>(row)] = true;
      refuse_free(rows[i]);
    }
    is_used_[static_cast<size_t>(rows[i])] = false;
  }
  for (const RowId row : rows) {
    if (is_wide()) {
      clear(wide_.data(), row);
    } else {
      clear(narrow_.data(), row);
    }
    lengths_[static_cast<size_t>(row)] = 0;
    free_rows_.push(row + 1);
  }
}

template <typename Slot>
void RequestTable::clear(Slot* table, RowId row) {
  std::fill_n(table + at(row, 0), lengths_[static_cast<size_t>(row)], Slot{0});
}

void RequestTable::refuse_free(RowId row) const {
  PC_EXPECTS(!is_used(row), InvalidSequence, "row ", row, " is repeated in one call; list each row once");
  check_row(row);
  fail(ErrorKind::Internal, "row ", row, " is used and not repeated");
}

void RequestTable::check_row(RowId row) const {
  PC_EXPECTS(row >= 0 && row < num_requests_, InvalidSequence, "row ", row, " does not exist; use 0 to ",
             num_requests_ - 1);
  PC_EXPECTS(is_used(row), InvalidSequence, "row ", row,
             " is not in use; use a row that allocate returned and that was not freed");
}

// Slots.

void RequestTable::write(RowSpan rows, CountSpan starts, CountSpan counts, SlotSpan slots) {
  PC_EXPECTS(starts.size() == rows.size() && counts.size() == rows.size(), ShapeError, starts.size(), " starts and ",
             counts.size(), " counts are given for ", rows.size(), " rows; give one for each, or one for all");
  plan_pieces(rows, starts, counts, slots.size());
  if (is_wide()) {
    write_pieces(wide_.data(), slots.data());
  } else {
    check_fit(slots);
    write_pieces(narrow_.data(), slots.data());
  }
}

void RequestTable::plan_pieces(RowSpan rows, CountSpan starts, CountSpan counts, size_t num_slots) {
  pieces_.clear();
  pieces_.reserve(rows.size());
  int64_t total = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Piece piece{rows[i], starts[i], counts[i]};
    if (!is_used(piece.row)) [[unlikely]]
      check_row(piece.row);
    PC_EXPECTS(piece.start >= 0 && piece.count >= 0, ShapeError, piece.count, " slots from position ", piece.start,
               " on cannot be written to row ", piece.row, "; positions and counts start at 0");
    PC_EXPECTS(int64_t{piece.start} + piece.count <= max_context_, ShapeError, piece.count, " slots from position ",
               piece.start, " on do not fit row ", piece.row, "; max_context is ", max_context_);
    total += piece.count;
    pieces_.push_back(piece);
  }
  PC_EXPECTS(total == static_cast<int64_t>(num_slots), ShapeError, num_slots, " slots are given for ", rows.size(),
             " rows that take ", total, "; give counts that add up to the slots");
}

void RequestTable::check_fit(SlotSpan slots) const {
  uint64_t beyond = 0;
  for (const SlotId slot : slots) beyond |= beyond_int32(slot);
  if (beyond == 0) return;
  const auto wrong = std::find_if(slots.begin(), slots.end(), beyond_int32);
  PC_EXPECTS(wrong == slots.end(), InvalidBlock, "slot ", *wrong,
             " does not fit a table of int32; make the table with dtype int64");
}

template <typename Slot>
void RequestTable::write_pieces(Slot* table, const SlotId* slots) {
  for (const Piece& piece : pieces_) {
    Slot* const out = table + at(piece.row, piece.start);
    for (TokenCount i = 0; i < piece.count; ++i) out[i] = static_cast<Slot>(slots[i]);
    slots += piece.count;
    TokenCount& length = lengths_[static_cast<size_t>(piece.row)];
    if (piece.count > 0) length = std::max(length, piece.start + piece.count);
  }
}

void RequestTable::check_range(RowId row, int64_t start, int64_t stop) const {
  check_row(row);
  PC_EXPECTS(start >= 0 && start <= stop && stop <= max_context_, ShapeError, "positions ", start, " to ", stop,
             " of row ", row, " cannot be read; use 0 <= start <= stop <= ", max_context_, ", the max_context");
}

void RequestTable::read(RowId row, int64_t start, int64_t stop, void* out) const {
  check_range(row, start, stop);
  if (is_wide()) {
    std::copy_n(wide_.data() + at(row, start), stop - start, static_cast<int64_t*>(out));
  } else {
    std::copy_n(narrow_.data() + at(row, start), stop - start, static_cast<int32_t*>(out));
  }
}

// Contents.

TokenCount RequestTable::length(RowId row) const {
  check_row(row);
  return lengths_[static_cast<size_t>(row)];
}

size_t RequestTable::nbytes() const {
  return sizeof(*this) + narrow_.nbytes() + wide_.nbytes() + lengths_.nbytes() + is_used_.nbytes() +
         free_rows_.nbytes() + pieces_.capacity() * sizeof(Piece);
}

void RequestTable::check_invariants() const {
  free_rows_.check_invariants();
  std::vector<bool> is_free(static_cast<size_t>(num_requests_));
  free_rows_.for_each([&](BlockId id) { is_free[static_cast<size_t>(id - 1)] = true; });
  for (size_t row = 0; row < is_free.size(); ++row) {
    PC_ASSERT(is_free[row] != (is_used_[row] != 0));
    PC_ASSERT(lengths_[row] >= 0 && lengths_[row] <= (is_free[row] ? 0 : max_context_));
  }
  if (is_wide()) {
    check_zeros(wide_.data());
  } else {
    check_zeros(narrow_.data());
  }
}

template <typename Slot>
void RequestTable::check_zeros(const Slot* table) const {
  for (RowId row = 0; row < num_requests_; ++row) {
    for (int64_t i = lengths_[static_cast<size_t>(row)]; i < max_context_; ++i) PC_ASSERT(table[at(row, i)] == 0);
  }
}

}  // namespace pagecore
