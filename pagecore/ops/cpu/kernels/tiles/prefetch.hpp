// Rows of a tile's tokens, and prefetching of the rows that are needed next.
//
// A processor drops prefetches while too many are outstanding, so the kernels issue a few at a time throughout their
// work.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"
#include "pagecore/ops/cpu/kernels/simd/lines.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Zen 5, which has pairs of bfloat16 but not AMX, reads contiguous rows fastest page by page, with prefetches into the
// first cache. Zen 4 reads them twice as fast in four streams. Other kernels do not have the choice.
#if defined(__AVX512BF16__) && !defined(PC_AMX)
constexpr bool kMayReadByPages = true;
#else
constexpr bool kMayReadByPages = false;
#endif

// Token rows: the row at index i is at base + offsets[i].
struct TokenRows {
  const char* base = nullptr;
  const int64_t* offsets = nullptr;
};

// The rows that the kernels need next: at a fixed distance from the rows in use, or in a tile of their own.
struct NextRows {
  int64_t distance = 0;  // bytes from a row in use to the row needed next
  TokenRows rows;        // used instead if base is not null
  int64_t row_bytes = 0;
  TokenRows scales;       // of the rows in `rows`; absent if base is null
  bool by_pages = false;  // the rows in use and those at `distance` are read page by page
};

// Prefetches bytes [from, from + bytes) of the row at index `place`.
PC_FORCE_INLINE void prefetch_elsewhere(const NextRows& next, int place, int64_t from, int64_t bytes) {
  if (from >= next.row_bytes) return;
  if (from == 0 && next.scales.base != nullptr) prefetch_line(next.scales.base + next.scales.offsets[place]);
  const char* row = next.rows.base + next.rows.offsets[place];
  for (int64_t i = from; i < from + bytes; i += kLine) prefetch_line(row + i);
}

// Prefetches the scales of the row at index `place`. Scales of neighbouring tokens often share a line.
PC_FORCE_INLINE void prefetch_scales(const NextRows& next, int place) {
  if (next.scales.base == nullptr) return;
  const char* scales = next.scales.base + next.scales.offsets[place];
  const char* before = next.scales.base + next.scales.offsets[place > 0 ? place - 1 : 0];
  if (place == 0 || ((reinterpret_cast<uintptr_t>(scales) ^ reinterpret_cast<uintptr_t>(before)) & -kLine) != 0) {
    prefetch_line_near(scales);
  }
}

// Prefetches the scales of all rows of a tile. Those of 16 tokens often share a line or two.
PC_FORCE_INLINE void prefetch_all_scales(const NextRows& next) {
  constexpr int kRun = 16;
  if (next.scales.base == nullptr) return;
  for (int t = 0; t < kTileTokens; t += kRun) {
    const int64_t first = next.scales.offsets[t], bytes = next.scales.offsets[t + kRun - 1] - first;
    if (bytes >= 0 && bytes < kRun * kLine) {
      for (int64_t i = 0; i <= bytes; i += kLine) prefetch_line_near(next.scales.base + first + i);
      prefetch_line_near(next.scales.base + first + bytes);
    } else {
      for (int i = t; i < t + kRun; ++i) prefetch_scales(next, i);
    }
  }
}

// Prefetches the row at index `place` with its scales.
PC_FORCE_INLINE void prefetch_row(const NextRows& next, int place) {
  if (next.rows.base == nullptr) return;
  const char* row = next.rows.base + next.rows.offsets[place];
  prefetch_line_near(row);
  for (int64_t i = kLine; i < next.row_bytes; i += kLine) prefetch_line_near(row + i);
  prefetch_scales(next, place);
}

// Prefetches `count` rows from index `place` on.
PC_FORCE_INLINE void prefetch_elsewhere(const NextRows& next, int place, int count) {
  if (next.rows.base == nullptr) return;
  for (int t = 0; t < count; ++t) prefetch_elsewhere(next, place + t, 0, next.row_bytes);
}

// Prefetches the first `places` rows, two cache lines a step, during work that does not touch memory.
class BackgroundPrefetch {
 public:
  PC_FORCE_INLINE BackgroundPrefetch(const NextRows& next, int places)
      : rows_(next.rows),
        scales_(next.scales),
        row_bytes_(next.row_bytes),
        left_(next.rows.base == nullptr ? 0 : places) {}

  PC_FORCE_INLINE void step() {
    if (left_ == 0) return;
    if (byte_ == 0 && scales_.base != nullptr) prefetch_line(scales_.base + scales_.offsets[place_]);
    const char* line = rows_.base + rows_.offsets[place_] + byte_;
    prefetch_line(line);
    prefetch_line(line + kLine);
    byte_ += 2 * kLine;
    if (byte_ < row_bytes_) return;
    byte_ = 0;
    ++place_;
    --left_;
  }

 private:
  const TokenRows rows_, scales_;
  const int64_t row_bytes_;
  int left_;
  int place_ = 0;
  int64_t byte_ = 0;
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
