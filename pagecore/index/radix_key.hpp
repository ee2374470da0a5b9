// What a prefix is looked up by: its tokens, the content that spans put into some blocks, and a namespace.
//
//   tokens   [ block 0 | block 1 | block 2 | block 3 ]      span [20, 40) of an image, block size 16:
//   marks                 ^ 4..24   ^ -12..8                 one mark a block that it overlaps, relative to that block
//
// Two blocks are equal iff their tokens are, and their marks are. The hash only finds candidates: each is compared.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>

#include "pagecore/native/ids.hpp"

namespace pagecore::radix {

using NodeId = int32_t;
using NamespaceId = int32_t;

inline constexpr NodeId kNoNode = -1;
inline constexpr int32_t kNoState = -1;

// A caller's name of some content; `kind` tells bytes from integers and short bytes from long ones.
struct Digest {
  int32_t kind = 0;
  std::array<uint8_t, 32> bytes{};
  bool operator==(const Digest&) const = default;
};

struct Mark {
  int32_t block;  // counted from the start of the query, or of the run that keeps the mark
  int64_t start;  // of the span, relative to the block's first token: negative where it began before
  int64_t end;
  Digest digest;

  [[nodiscard]] bool says_the_same(const Mark& other) const {
    return start == other.start && end == other.end && digest == other.digest;
  }
};

// Marks stand in the order of their blocks. The memory is the caller's.
struct Query {
  std::span<const int32_t> tokens;
  std::span<const Mark> marks;
  NamespaceId space = 0;
};

[[nodiscard]] inline const Mark* first_mark_from(std::span<const Mark> marks, int64_t block) {
  return std::lower_bound(marks.data(), marks.data() + marks.size(), block,
                          [](const Mark& mark, int64_t wanted) { return mark.block < wanted; });
}

// How many of `count` leading blocks, from `a` on in the one and from `b` on in the other, have equal marks.
[[nodiscard]] inline int64_t common_marks(std::span<const Mark> left, int64_t a, std::span<const Mark> right, int64_t b,
                                          int64_t count) {
  const Mark* x = first_mark_from(left, a);
  const Mark* y = first_mark_from(right, b);
  const Mark* const x_end = left.data() + left.size();
  const Mark* const y_end = right.data() + right.size();
  while (true) {
    const int64_t at_x = x == x_end ? count : std::min(count, x->block - a);
    const int64_t at_y = y == y_end ? count : std::min(count, y->block - b);
    if (at_x != at_y) return std::min(at_x, at_y);
    if (at_x == count) return count;
    if (!x->says_the_same(*y)) return at_x;
    ++x, ++y;
  }
}

// Tokens before the first difference, at most `count`.
[[nodiscard]] inline int64_t common_tokens(const int32_t* a, const int32_t* b, int64_t count) {
  constexpr int64_t kStride = 64;
  int64_t i = 0;
  while (i + kStride <= count && std::memcmp(a + i, b + i, kStride * sizeof(int32_t)) == 0) i += kStride;
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

// Multiplies to 128 bits and folds; the seed is drawn for each tree, so that nobody can prepare collisions.
class BlockHash {
 public:
  explicit BlockHash(uint64_t seed) : seed_(seed | 1), other_(fold(seed ^ kOdd, kOdd)) {}

  [[nodiscard]] uint32_t operator()(NodeId parent, const int32_t* tokens, int64_t count, std::span<const Mark> marks,
                                    int64_t block) const {
    uint64_t hash = fold(seed_ ^ static_cast<uint32_t>(parent), other_);
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) hash = fold(two(tokens + i) ^ other_, two(tokens + i + 2) ^ hash);
    for (; i < count; ++i) hash = fold(static_cast<uint32_t>(tokens[i]) ^ other_, hash ^ seed_);
    if (!marks.empty()) [[unlikely]]
      hash = add_marks(hash, marks, block);
    return static_cast<uint32_t>(fold(hash ^ kOdd, seed_) >> 32);
  }

 private:
  static constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;
  __extension__ typedef unsigned __int128 Wide;

  [[nodiscard]] static uint64_t fold(uint64_t a, uint64_t b) {
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  [[nodiscard]] static uint64_t two(const int32_t* tokens) {
    uint64_t value;
    std::memcpy(&value, tokens, sizeof value);
    return value;
  }
  [[nodiscard]] uint64_t add_marks(uint64_t hash, std::span<const Mark> marks, int64_t block) const {
    const Mark* const end = marks.data() + marks.size();
    for (const Mark* mark = first_mark_from(marks, block); mark != end && mark->block == block; ++mark) {
      std::array<uint64_t, 4> words;
      std::memcpy(words.data(), mark->digest.bytes.data(), sizeof words);
      hash = fold(words[0] ^ other_, words[1] ^ hash);
      hash = fold(words[2] ^ other_, words[3] ^ hash);
      hash = fold(static_cast<uint64_t>(mark->start) ^ other_, static_cast<uint64_t>(mark->end) ^ hash);
      hash = fold(static_cast<uint32_t>(mark->digest.kind) ^ other_, hash ^ seed_);
    }
    return hash;
  }

  uint64_t seed_;
  uint64_t other_;
};

}  // namespace pagecore::radix
