// Lookup keys of the tree: tokens, the content that spans put into some blocks, and a namespace.
//
//   tokens   [ block 0 | block 1 | block 2 | block 3 ]      span [20, 40) of an image, block size 16:
//   marks                 ^ 4..24   ^ -12..8                 one mark for each block that it overlaps, with positions
//                                                            relative to that block
//
// Two blocks are equal iff their tokens and their marks are equal. Hashes only select candidates; each candidate is
// compared.
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

// The caller's name for some content. `kind` is the number of bytes, or -1 for an integer.
struct Digest {
  int32_t kind = 0;
  std::array<uint8_t, 32> bytes{};
  bool operator==(const Digest&) const = default;
};

struct Mark {
  int32_t block;  // index in the query, or in the storage that keeps the mark
  int64_t start;  // of the span, relative to the first token of the block: negative if the span began before it
  int64_t end;
  Digest digest;

  [[nodiscard]] bool has_equal_content(const Mark& other) const {
    return start == other.start && end == other.end && digest == other.digest;
  }
};

// A prefix. Marks are sorted by block. The caller owns the memory.
struct Query {
  std::span<const int32_t> tokens;
  std::span<const Mark> marks;
  NamespaceId space = 0;
};

// A top-level node names its namespace instead of a parent: namespaces 0, 1 ... are the parents -1, -2 ...
[[nodiscard]] inline NodeId top_of(NamespaceId space) { return -1 - space; }
[[nodiscard]] inline NamespaceId namespace_of(NodeId top) { return -1 - top; }

// The first mark of a block >= `block`.
[[nodiscard]] inline const Mark* first_mark_from(std::span<const Mark> marks, int64_t block) {
  return std::lower_bound(marks.data(), marks.data() + marks.size(), block,
                          [](const Mark& mark, int64_t wanted) { return mark.block < wanted; });
}

// The number of leading blocks with equal marks among left [a, a + count) and right [b, b + count).
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
    if (!x->has_equal_content(*y)) return at_x;
    ++x, ++y;
  }
}

// The number of tokens before the first difference, at most `count`.
[[nodiscard]] inline int64_t common_tokens(const int32_t* a, const int32_t* b, int64_t count) {
  constexpr int64_t kStride = 64;
  int64_t i = 0;
  while (i + kStride <= count && std::memcmp(a + i, b + i, kStride * sizeof(int32_t)) == 0) i += kStride;
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

// Hash of a block and its parent: 64 x 64 -> 128-bit multiplications, folded. Each tree draws its own seed, so that a
// client cannot prepare collisions.
class BlockHash {
 public:
  explicit BlockHash(uint64_t seed) : seed_(seed | 1), other_(fold(seed ^ kOdd, kOdd)) {}

  [[nodiscard]] uint32_t operator()(NodeId parent, const int32_t* tokens, int64_t count, std::span<const Mark> marks,
                                    int64_t block) const {
    uint64_t hash = fold(seed_ ^ static_cast<uint32_t>(parent), other_);
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) hash = fold(load_two(tokens + i) ^ other_, load_two(tokens + i + 2) ^ hash);
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
  [[nodiscard]] static uint64_t load_two(const int32_t* tokens) {
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
