// Keys of a tile that the rows of a pass attend to; identical for all heads.
#pragma once

#include "pagecore/ops/cpu/kernels/tiles/tile.hpp"
#include "pagecore/ops/cpu/kernels/tiles/tree_rows.hpp"
#include "pagecore/ops/key_range.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

struct RowRange {
  int64_t first;
  int64_t last;
};

// Computes low, high and keep of a Scratch for one tile at a time. The accessors describe the tile visited last.
class Visibility {
 public:
  Visibility(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item, int64_t group)
      : window_(make_window(args.causal, args.window_left, args.window_right, args.sink_tokens)),
        queries_(item.query_count),
        group_(group),
        length_(batch.seq_lens[item.sequence]),
        position_(length_ - (batch.cu_query_lens[item.sequence + 1] - item.query_begin)),
        tree_(args, batch, item) {
    if (args.mask == nullptr) return;
    const int64_t first_query = item.query_begin - batch.cu_query_lens[item.sequence];
    mask_ = args.mask + batch.mask_starts[item.sequence] + first_query * length_;
  }

  [[nodiscard]] const Window& window() const { return window_; }
  [[nodiscard]] int64_t length() const { return length_; }
  [[nodiscard]] int64_t position(int64_t query) const {
    return tree_.absent() ? position_ + query : tree_.position(query);
  }

  // Chooses between the two ranges of keys: the sinks, or the window.
  void see_sinks(bool sees) { sees_sinks_ = sees; }
  // The sinks that the item's rows attend to.
  [[nodiscard]] KeyRange sinks() const { return sink_keys(window_, position(queries_ - 1), length_); }

  void visit(const Tile& tile, const Scratch& scratch) {
    in_tree_ = !tree_.absent() && tile.start + tile.last > tree_.begin();
    uniform_ = mask_ == nullptr && !in_tree_;
    use_ = {static_cast<int>(kTileTokens), 0, nullptr};
    rows_ = {queries_ * group_, 0};
    for (int64_t query = 0; query < queries_; ++query) {
      KeyRange keys = sees_sinks_ ? sink_keys(window_, position(query), length_)
                                  : attended_keys(window_, position(query), position(query), length_);
      if (!tree_.absent()) keys = {keys.begin < tree_.begin() ? keys.begin : tree_.begin(), position_ + query + 1};
      const int low = clamp_to_tile(keys.begin, tile);
      const int high = clamp_to_tile(keys.end, tile);
      for (int64_t g = 0; g < group_; ++g) {
        scratch.low[query * group_ + g] = low;
        scratch.high[query * group_ + g] = high;
      }
      uniform_ = uniform_ && low == scratch.low[0] && high == scratch.high[0];
      if (low >= high) continue;
      use_.first = low < use_.first ? low : use_.first;
      use_.last = high > use_.last ? high : use_.last;
      rows_ = {query * group_ < rows_.first ? query * group_ : rows_.first, (query + 1) * group_};
    }
    if (masked() && !empty()) apply_mask(tile, scratch);
  }

  // True if `keep` of the scratch says which keys of the tile each query attends to.
  [[nodiscard]] bool masked() const { return mask_ != nullptr || in_tree_; }
  // The positions of the tile's keys for a query of a tree; null if they are consecutive.
  [[nodiscard]] const int32_t* positions(const Tile& tile, int64_t query) {
    if (!in_tree_) return nullptr;
    tree_.place(tile, query, positions_);
    return positions_;
  }

  // True if no row attends to any key.
  [[nodiscard]] bool empty() const { return use_.first >= use_.last; }
  // True if all rows attend to the same keys.
  [[nodiscard]] bool uniform() const { return uniform_; }
  // True if every row attends to all keys.
  [[nodiscard]] bool whole() const { return uniform_ && use_.first == 0 && use_.last == kTileTokens; }
  [[nodiscard]] const TileUse& use() const { return use_; }
  // The range of rows that attend to any key.
  [[nodiscard]] const RowRange& rows() const { return rows_; }

 private:
  [[nodiscard]] static int clamp_to_tile(int64_t position, const Tile& tile) {
    if (tile.is_selected) return selected_before(position, tile);
    const int64_t t = position - tile.start;
    return static_cast<int>(t < tile.first ? tile.first : t > tile.last ? tile.last : t);
  }

  // The index of the first key of the tile that is not before `position`.
  [[nodiscard]] static int selected_before(int64_t position, const Tile& tile) {
    int t = tile.first;
    while (t < tile.last && tile.positions[t] < position) ++t;
    return t;
  }

  void apply_mask(const Tile& tile, const Scratch& scratch) {
    for (int64_t t = 0; t < kTileTokens; ++t) used_[t] = 0;
    use_.used = used_;
    for (int64_t query = 0; query < queries_; ++query) {
      const int low = scratch.low[query * group_], high = scratch.high[query * group_];
      uint8_t* keep = scratch.keep + query * kTileTokens;
      if (in_tree_) {
        tree_.keep(tile, query, low, high, window_, keep);
      } else {
        copy_mask(tile, mask_ + query * length_, low, high, keep);
      }
      for (int t = 0; t < kTileTokens; ++t) used_[t] |= keep[t];
    }
  }

  static void copy_mask(const Tile& tile, const uint8_t* mask, int low, int high, uint8_t* keep) {
    for (int t = 0; t < kTileTokens; ++t) {
      const int64_t at = tile.is_selected ? tile.positions[t] : tile.start + t;
      keep[t] = t >= low && t < high && mask[at] != 0 ? 1 : 0;
    }
  }

  Window window_;
  int64_t queries_;
  int64_t group_;
  int64_t length_;
  int64_t position_;  // of the item's first query, in the order of the slots
  TreeRows tree_;
  const uint8_t* mask_ = nullptr;  // row of the item's first query
  bool in_tree_ = false;           // the tile has new tokens of a tree
  bool sees_sinks_ = false;
  bool uniform_ = true;
  TileUse use_{};
  RowRange rows_{};
  uint8_t used_[kTileTokens];
  int32_t positions_[kTileTokens];
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
