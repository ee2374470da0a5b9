// The new tokens of a sequence as a tree: the keys of a tile that a query attends to, and their positions.
//
//   tree            row of bits     position        keys of the query "d", W = 2
//   a ─┬─ b ── d    a  000001       base            history  ... base - 1     too far
//      └─ c ── e    b  000011       base + 1        a  ancestor, distance 2   too far
//                   c  000101       base + 1        b  ancestor, distance 1   attended
//                   d  001011       base + 2        c  another branch         not attended
//                   e  010101       base + 2        d  itself                 attended
//
// The ancestors of a token precede it, so that the k-th set bit below its own is that of its k-th ancestor: the
// position of a key follows from the query's position and row of bits.
#pragma once

#include <limits>

#include "pagecore/ops/cpu/kernels/tiles/tile.hpp"
#include "pagecore/ops/key_range.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The rows of bits of an item's queries.
class TreeRows {
 public:
  TreeRows(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item) {
    if (args.tree.bits == nullptr) return;
    words_ = args.tree.words;
    bits_ = args.tree.bits + item.query_begin * words_;
    positions_ = batch.tree_positions + item.query_begin;
    const int64_t first = batch.cu_query_lens[item.sequence];
    begin_ = batch.seq_lens[item.sequence] - (batch.cu_query_lens[item.sequence + 1] - first);
    index_ = item.query_begin - first;
  }

  [[nodiscard]] bool absent() const { return bits_ == nullptr; }
  // The key of the sequence's first new token.
  [[nodiscard]] int64_t begin() const { return begin_; }
  [[nodiscard]] int64_t position(int64_t query) const { return positions_[query]; }

  // Writes 1 for the keys of the tile, of those from `low` to `high` - 1, that a query attends to, and 0 for others.
  void keep(const Tile& tile, int64_t query, int low, int high, const Window& window, uint8_t* keep) const {
    for (int t = 0; t < kTileTokens; ++t) keep[t] = t >= low && t < high ? 1 : 0;
    int64_t farthest = window.left;  // below -1: chunks
    if (window.left == -1) farthest = std::numeric_limits<int64_t>::max();
    if (window.left < -1) farthest = position(query) % chunk_of_left(window.left);
    visit_new(tile, query, [&](int t, bool is_ancestor, int64_t distance) {
      if (!is_ancestor || distance > farthest) keep[t] = 0;
    });
  }

  // Writes the positions of the tile's keys; that of a new token is right if the query attends to it.
  void place(const Tile& tile, int64_t query, int32_t* positions) const {
    for (int t = 0; t < kTileTokens; ++t) positions[t] = static_cast<int32_t>(tile.start + t);
    visit_new(tile, query,
              [&](int t, bool, int64_t distance) { positions[t] = static_cast<int32_t>(position(query) - distance); });
  }

 private:
  // Calls visit(t, is_ancestor, distance) for the new tokens of the tile up to the query's own, last to first. The
  // distance is the number of the query's bits above the token's.
  template <typename Visit>
  PC_FORCE_INLINE void visit_new(const Tile& tile, int64_t query, Visit&& visit) const {
    const uint64_t* row = bits_ + query * words_;
    const int64_t own = index_ + query, after = tile.start + kTileTokens - begin_;
    int64_t i = own < after - 1 ? own : after - 1;
    int64_t distance = 0;
    for (int64_t later = i + 1; later <= own; ++later)
      distance += static_cast<int64_t>(row[later / 64] >> later % 64 & 1);
    const int64_t first = tile.start > begin_ ? tile.start - begin_ : 0;
    for (; i >= first; --i) {
      const bool is_ancestor = (row[i / 64] >> i % 64 & 1) != 0;
      visit(static_cast<int>(begin_ + i - tile.start), is_ancestor, distance);
      distance += is_ancestor ? 1 : 0;
    }
  }

  const uint64_t* bits_ = nullptr;  // row of the item's first query
  const int32_t* positions_ = nullptr;
  int64_t words_ = 0;
  int64_t begin_ = 0;
  int64_t index_ = 0;  // of the item's first query among the new tokens of its sequence
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
