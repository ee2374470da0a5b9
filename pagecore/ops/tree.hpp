// Rows of bits of a tree: the tokens that each token attends to.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pagecore {

// Returns the first entry of `parents` that is not -1 or the index of an earlier token; `count` if there is none.
inline int64_t first_wrong_parent(const int64_t* parents, int64_t count) {
  int64_t i = 0;
  while (i < count && parents[i] >= -1 && parents[i] < i) ++i;
  return i;
}

// Writes the row of each token, [count, words], and its depth, [count]; `depths` may be null. A token attends to itself
// and to what its parent attends to. The parents are valid, and words * 64 >= count.
inline void write_tree(const int64_t* parents, int64_t count, int64_t words, uint64_t* rows, int32_t* depths) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t* row = rows + i * words;
    if (parents[i] < 0) {
      std::fill_n(row, words, uint64_t{0});
    } else {
      std::copy_n(rows + parents[i] * words, words, row);
    }
    row[i / 64] |= uint64_t{1} << i % 64;
    if (depths != nullptr) depths[i] = parents[i] < 0 ? 0 : depths[parents[i]] + 1;
  }
}

// write_tree() for tokens without branches: token i attends to 0 .. i.
inline void write_chain(int64_t count, int64_t words, uint64_t* rows) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t* row = rows + i * words;
    std::fill_n(row, words, uint64_t{0});
    std::fill_n(row, i / 64, ~uint64_t{0});
    row[i / 64] = ~uint64_t{0} >> (63 - i % 64);
  }
}

}  // namespace pagecore
