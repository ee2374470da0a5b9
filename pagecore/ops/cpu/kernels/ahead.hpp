// Where the tokens of a tile lie, and asking memory for what comes next.
//
// A processor drops what it is asked for while too much is on its way; so it is asked for a few lines at a time, all
// through the work.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"
#include "pagecore/ops/cpu/kernels/lines.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The row of the token at a place is at base + offsets[place].
struct Tokens {
  const char* base = nullptr;
  const int64_t* offsets = nullptr;
};

struct Ahead {
  int64_t distance = 0;  // the rows that are wanted next lie so far behind the ones at hand
  Tokens elsewhere;      // or here, where base is not null
  int64_t row_bytes = 0;
};

// A part of the row at a place, where the next rows lie elsewhere.
PC_FORCE_INLINE void ask_elsewhere(const Ahead& ahead, int place, int64_t from, int64_t bytes) {
  if (from >= ahead.row_bytes) return;
  const char* row = ahead.elsewhere.base + ahead.elsewhere.offsets[place];
  for (int64_t i = from; i < from + bytes; i += kLine) fetch_line(row + i);
}

// The rows at `count` places, where the next rows lie elsewhere.
PC_FORCE_INLINE void ask_elsewhere(const Ahead& ahead, int place, int count) {
  if (ahead.elsewhere.base == nullptr) return;
  for (int t = 0; t < count; ++t) ask_elsewhere(ahead, place + t, 0, ahead.row_bytes);
}

// Rows elsewhere for work that has none of its own, from the first place on.
class Errand {
 public:
  PC_FORCE_INLINE Errand(const Ahead& ahead, int places)
      : rows_(ahead.elsewhere), row_bytes_(ahead.row_bytes), left_(ahead.elsewhere.base == nullptr ? 0 : places) {}

  // Asks for the next two lines.
  PC_FORCE_INLINE void go() {
    if (left_ == 0) return;
    const char* line = rows_.base + rows_.offsets[place_] + byte_;
    fetch_line(line);
    fetch_line(line + kLine);
    byte_ += 2 * kLine;
    if (byte_ < row_bytes_) return;
    byte_ = 0;
    ++place_;
    --left_;
  }

 private:
  const Tokens rows_;
  const int64_t row_bytes_;
  int left_;
  int place_ = 0;
  int64_t byte_ = 0;
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
