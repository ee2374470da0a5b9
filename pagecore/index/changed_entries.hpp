// Which entries of an array have changed since somebody last took them: for a copy of the array that lives elsewhere.
//
// An entry that changes again before it is taken is marked once, so that the set is never larger than the array, and
// entries come out ascending, so that whoever writes them into the copy walks it forwards.
// Cost: a bit an entry, taken from the system as it is first marked; O(1) to mark, O(log64 n) at most to take; no
// allocation after construction. Threads: the owner's.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "pagecore/index/id_bitmap.hpp"

namespace pagecore {

// Entry `index` of the array holds `value` now. Both are wide, so that an array of these has one type.
struct ChangedEntry {
  int64_t index;
  int64_t value;
};

class ChangedEntries {
 public:
  explicit ChangedEntries(int32_t num_entries) : marked_(num_entries) {}

  [[nodiscard]] bool is_empty() const { return marked_.is_empty(); }
  [[nodiscard]] size_t nbytes() const { return marked_.nbytes(); }

  void mark(int32_t index) { marked_.insert(index); }
  void mark_run(int32_t first, int32_t count) { marked_.insert_run(first, count); }

  // Moves the lowest entries into `out`, as many as there are or have room; value_of(index) tells what they hold.
  template <typename ValueOf>
  [[nodiscard]] size_t take(std::span<ChangedEntry> out, ValueOf value_of) {
    std::array<int32_t, 256> indices;
    size_t count = 0;
    while (count < out.size() && !marked_.is_empty()) {
      const size_t most = std::min(indices.size(), out.size() - count);
      const size_t taken = marked_.take_lowest(std::span(indices).first(most));
      for (const int32_t index : std::span(indices).first(taken)) out[count++] = {index, value_of(index)};
    }
    return count;
  }

  // Undoes take().
  void put_back(std::span<const ChangedEntry> entries) {
    for (const ChangedEntry& entry : entries) mark(static_cast<int32_t>(entry.index));
  }

  void check_invariants() const { marked_.check_levels(); }

 private:
  IdBitmap marked_;
};

}  // namespace pagecore
