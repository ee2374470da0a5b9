// Set of changed entries of an array, for a mirror of the array.
//
// An entry that changes again before it is taken is marked once, so that the set is never larger than the array.
// Entries are taken in ascending order, so that the mirror is written front to back. Cost: one bit an entry, committed
// when first marked; O(1) to mark, at most O(log64 n) to take; no allocation after construction. Threads: the owner
// synchronises.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "pagecore/index/pools/id_bitmap.hpp"

namespace pagecore {

// Entry `index` of the array holds `value`. Both have 64 bits, so that an array of these has one type.
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

  // Moves up to out.size() of the lowest entries to `out`, with value_of(index) as their values; returns the number.
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
