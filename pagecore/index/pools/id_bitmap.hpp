// Hierarchical bitmap: a set of small ids with the lowest available in O(log64 n).
//
// Level 0 has one bit for each id; level l + 1 has one bit for each word of level l.
// I1: a bit of level l + 1 is set iff its word of level l is not zero. The top level is one word.
//
//   level 1   |01...|                    word 0 of level 0 is empty, word 1 is not (bit 0 is leftmost)
//   level 0   |00...00|0110...00|...     ids 65 and 66 are in the set
//
// Cost: insert and erase touch one word unless a word becomes or stops being empty. Threads: the owner synchronises.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>

#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/native/checks.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

class IdBitmap {
 public:
  explicit IdBitmap(int64_t capacity) : words_(place_levels(capacity)) {}

  [[nodiscard]] bool is_empty() const { return words_[start_[num_levels_ - 1]] == 0; }
  // Precondition: the set is not empty.
  [[nodiscard]] BlockId lowest() const {
    const size_t at = lowest_word();
    return static_cast<BlockId>(at * 64 + static_cast<size_t>(std::countr_zero(words_[at])));
  }
  [[nodiscard]] bool contains(BlockId id) const { return (words_[word_of(id)] >> bit_of(id)) & 1; }

  void insert(BlockId id) {
    uint64_t& word = words_[word_of(id)];
    const bool was_empty = word == 0;
    word |= uint64_t{1} << bit_of(id);
    if (was_empty) insert_above(word_of(id));
  }

  // Calls work(insert) once; consecutive ids of one word cost one access. Returns the number of inserted ids.
  template <typename Work>
  BlockId insert_many(Work work) {
    size_t at = 0;
    uint64_t bits = 0;  // pending for word `at`
    BlockId count = 0;
    const auto settle = [&] {
      if (bits == 0) return;
      const bool was_empty = words_[at] == 0;
      words_[at] |= bits;
      if (was_empty) insert_above(at);
    };
    work([&](BlockId id) {
      if (word_of(id) != at) {
        settle();
        at = word_of(id);
        bits = 0;
      }
      bits |= uint64_t{1} << bit_of(id);
      ++count;
    });
    settle();
    return count;
  }

  // Inserts ids [first, first + count).
  void insert_run(BlockId first, BlockId count) {
    for (int64_t id = first, end = int64_t{first} + count; id < end;) {
      const auto at = static_cast<size_t>(id) >> 6;
      const int64_t next = std::min(end, static_cast<int64_t>(at + 1) * 64);
      const bool was_empty = words_[at] == 0;
      words_[at] |= ~uint64_t{0} >> (64 - (next - id)) << (id & 63);
      if (was_empty) insert_above(at);
      id = next;
    }
  }

  void erase(BlockId id) {
    words_[word_of(id)] &= ~(uint64_t{1} << bit_of(id));
    if (words_[word_of(id)] == 0) erase_above(word_of(id));
  }

  // Moves up to out.size() of the lowest ids to `out` in ascending order; returns the number.
  size_t take_lowest(std::span<BlockId> out) {
    size_t taken = 0;
    while (taken < out.size() && !is_empty()) {
      const size_t at = lowest_word();
      uint64_t word = words_[at];
      if (word == ~uint64_t{0} && out.size() - taken >= 64) {  // a full word needs no search
        for (size_t bit = 0; bit < 64; ++bit) out[taken + bit] = static_cast<BlockId>(at * 64 + bit);
        taken += 64;
        word = 0;
      }
      for (; word != 0 && taken < out.size(); word &= word - 1) {
        out[taken++] = static_cast<BlockId>(at * 64 + static_cast<size_t>(std::countr_zero(word)));
      }
      words_[at] = word;
      if (word == 0) erase_above(at);
    }
    return taken;
  }

  [[nodiscard]] size_t nbytes() const { return words_.nbytes(); }

  // `size`: the expected number of ids.
  void check_invariants(int64_t size) const {
    int64_t found = 0;
    for (size_t i = 0; i < start_[1]; ++i) found += std::popcount(words_[i]);
    PC_ASSERT(found == size);
    check_levels();
  }
  void check_levels() const {
    for (int level = 1; level < num_levels_; ++level) {
      for (size_t i = 0; i < start_[level] - start_[level - 1]; ++i) {
        const bool marked = (words_[start_[level] + (i >> 6)] >> (i & 63)) & 1;
        PC_ASSERT(marked == (words_[start_[level - 1] + i] != 0));
      }
    }
  }

 private:
  static constexpr int kMaxLevels = 6;  // 64^6 > 2^31

  static size_t word_of(BlockId id) { return static_cast<size_t>(id) >> 6; }
  static unsigned bit_of(BlockId id) { return static_cast<unsigned>(id) & 63; }

  // Sets start_ and num_levels_; returns the number of words of all levels.
  size_t place_levels(int64_t capacity) {
    auto words = static_cast<size_t>(capacity + 63) / 64;
    size_t total = 0;
    do {
      start_[num_levels_++] = total;
      total += words;
      start_[num_levels_] = total;
      words = words > 1 ? (words + 63) / 64 : 0;
    } while (words > 0);
    return total;
  }

  // The first non-empty word of level 0. Precondition: the set is not empty.
  [[nodiscard]] size_t lowest_word() const {
    size_t at = 0;
    for (int level = num_levels_ - 1; level > 0; --level) {
      at = at * 64 + static_cast<size_t>(std::countr_zero(words_[start_[level] + at]));
    }
    return at;
  }

  // Word `at` of level 0 has become non-empty.
  void insert_above(size_t at) {
    for (int level = 1; level < num_levels_; ++level, at >>= 6) {
      uint64_t& word = words_[start_[level] + (at >> 6)];
      const bool was_empty = word == 0;
      word |= uint64_t{1} << (at & 63);
      if (!was_empty) return;
    }
  }

  // Word `at` of level 0 has become empty.
  void erase_above(size_t at) {
    for (int level = 1; level < num_levels_; ++level, at >>= 6) {
      uint64_t& word = words_[start_[level] + (at >> 6)];
      word &= ~(uint64_t{1} << (at & 63));
      if (word != 0) return;
    }
  }

  std::array<size_t, kMaxLevels + 1> start_{};  // offset of each level in words_, then the end of the last
  int num_levels_ = 0;
  ZeroedArray<uint64_t> words_;
};

}  // namespace pagecore
