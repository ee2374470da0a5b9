// Few query rows that are multiplied straight from the codes of a tile: their blocks, and prefetching meanwhile.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/stored_tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Prefetches one row for each key of a tile, or the row of the key itself, which is at hand. Few variables and
// branches, because the products need the registers.
class RowAhead {
 public:
  PC_FORCE_INLINE explicit RowAhead(const StoredTile& tile)
      : base_(0), offsets_(reinterpret_cast<const Address*>(tile.codes)), last_(0) {}
  PC_FORCE_INLINE explicit RowAhead(const NextRows& next)
      : base_(reinterpret_cast<int64_t>(next.rows.base)), offsets_(next.rows.offsets), last_(next.row_bytes - 1) {}

  // The i-th row of four streams (tile.hpp), in each of which the hardware runs ahead, into the second cache: the first
  // has too few lines in flight for memory.
  PC_FORCE_INLINE void prefetch_streams(int i) const {
    const auto turn = static_cast<unsigned>(i);
    const auto* const row =
        reinterpret_cast<const char*>(base_ + offsets_[turn % kStreams * (kTileTokens / kStreams) + turn / kStreams]);
    prefetch_line(row);
    prefetch_line(row + last_);
    if (last_ >= 2 * kLine) [[unlikely]]
      prefetch_middle(row);
  }

 private:
  PC_FORCE_INLINE void prefetch_middle(const char* row) const {
    for (int64_t i = kLine; i <= last_ - kLine; i += kLine) prefetch_line(row + i);
  }

  int64_t base_;
  const Address* offsets_;
  int64_t last_;  // byte of a row
};

PC_FORCE_INLINE RowAhead rows_ahead(const NextRows& next_rows, const StoredTile& tile) {
  return next_rows.rows.base != nullptr ? RowAhead(next_rows) : RowAhead(tile);
}

// Prefetches the rows of a tile, in four streams, a few at a time in the course of several steps.
class StreamsAhead {
 public:
  PC_FORCE_INLINE explicit StreamsAhead(const NextRows& next)
      : rows_(next), left_(next.rows.base == nullptr ? 0 : static_cast<int>(kTileTokens)) {}

  PC_FORCE_INLINE void prefetch(int64_t rows) {
    for (; rows > 0 && left_ > 0; --rows, --left_) rows_.prefetch_streams(static_cast<int>(kTileTokens) - left_);
  }
  // At one of `steps` steps that are left.
  PC_FORCE_INLINE void prefetch_part(int64_t steps) { prefetch((left_ + steps - 1) / steps); }

 private:
  RowAhead rows_;
  int left_;
};

// Prefetches the rows of a tile in the course of several passes over the tokens of another: a processor stalls if one
// pass asks for all of them.
class PassAhead {
 public:
  PC_FORCE_INLINE PassAhead(const NextRows& next, int64_t passes) : ahead_(next), none_(next.rows.base == nullptr) {
    while (shift_ < 6 && int64_t{2} << shift_ <= passes) ++shift_;
  }

  // Begins a pass, and returns true if it has rows to prefetch.
  PC_FORCE_INLINE bool begin(int64_t pass) {
    first_ = static_cast<int>(pass) * (static_cast<int>(kTileTokens) >> shift_);
    return !none_ && first_ < kTileTokens;
  }
  // At the token t of a pass.
  PC_FORCE_INLINE void prefetch(int t) const {
    if ((t & ((1 << shift_) - 1)) == 0) ahead_.prefetch_streams(first_ + (t >> shift_));
  }

 private:
  RowAhead ahead_;
  bool none_;
  int shift_ = 0;  // of the tokens for each row
  int first_ = 0;
};

// Rows of the largest blocks whose sums have registers, for one operand of codes at a time.
constexpr int kMostBlockRows = kLanes == 16 ? 8 : 4;

// Calls visit.operator()<R>(row) for blocks of at most kMost rows: 8, 4, 2 and 1.
template <int kMost = 4, typename Visit>
PC_FORCE_INLINE void for_each_even_block(int64_t rows, Visit&& visit) {
  int64_t row = 0;
  if constexpr (kMost == 8) {
    for (; row + 8 <= rows; row += 8) visit.template operator()<8>(row);
  }
  if constexpr (kMost >= 4) {
    for (; row + 4 <= rows; row += 4) visit.template operator()<4>(row);
  }
  for (; row + 2 <= rows; row += 2) visit.template operator()<2>(row);
  if (row < rows) visit.template operator()<1>(row);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
