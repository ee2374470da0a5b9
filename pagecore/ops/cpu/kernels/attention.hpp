// Attention of one item: the queries of one tile, all heads of one pass, over the item's keys.
//
//   for each tile of 64 keys                     offsets once, from the block table
//     for each key head
//       scores    rows x 64
//       weights                                  one softmax step for each row
//     for each key head
//       values    rows x dim
//
// All heads of the keys before the values, so that whole blocks are read as they lie in memory. A row is one (query,
// head of the group), queries outermost. Few rows meet keys and values where they lie in the cache; many rows, masks
// and dims that are no whole vectors meet packed copies. Of a tile to whose parts rows attend differently, and for AMX,
// the values are packed in any case.
//
// Products with a packed copy give each row the same bits beside any other rows, so batch invariance takes them always.
#pragma once

#include "pagecore/ops/cpu/kernels/direct.hpp"
#include "pagecore/ops/cpu/kernels/finish.hpp"
#include "pagecore/ops/cpu/kernels/packed.hpp"
#include "pagecore/ops/cpu/kernels/sight.hpp"
#include "pagecore/ops/cpu/kernels/softmax.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Rows from which on a packed copy of the tile costs less than it saves.
constexpr int64_t kPackRows = 16;
static_assert(kPackRows <= kDecodeRows, "AMX decodes fewer rows than are packed");

class Pass {
 public:
  Pass(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item, int64_t head_begin,
       int64_t head_count, float* memory)
      : args_(args),
        batch_(batch),
        item_(item),
        blocks_(args.table.row(batch.rows[item.sequence])),
        head_begin_(head_begin),
        head_count_(head_count),
        group_(args.query.num_heads / args.key.num_heads),
        rows_(item.query_count * group_),
        value_stride_(padded(args.value.dim)),
        sight_(args, batch, item, group_),
        pairs_(meets_pairs(args)),
        packed_(batch.invariant || rows_ >= kPackRows || args.mask != nullptr || !is_whole(args.key.dim) ||
                !is_whole(args.value.dim)),
        by_tiles_(kHasTiles && pairs_ && !packed_ && batch.from_cache),
        query_stride_(pairs_ ? pair_padded(args.key.dim) : padded(args.key.dim)),
        streams_(streams_for(args.key.dim * size_of(args.key.type))) {
    carve(reinterpret_cast<uintptr_t>(memory), head_count, rows_, args.key.dim, args.value.dim, scratch_);
  }

  void run() {
    start();
    if (pairs_) {
      Tiles tiles;
      tiles_ = &tiles;
      visit_tiles();
    } else {
      visit_tiles();
    }
    finish();
  }

 private:
  // Weights are then rounded to bfloat16, which an output of bfloat16 does not show.
  static bool meets_pairs(const AttentionArgs& args) {
    return kHasPairs && args.query.type == Float::BF16 && args.key.type == Float::BF16 &&
           args.value.type == Float::BF16 && args.out.type == Float::BF16;
  }

  [[nodiscard]] bool is_whole(int64_t dim) const { return dim % (pairs_ ? 2 * kLanes : kLanes) == 0; }

  // ---- before the first tile

  void start() {
    const int64_t all = head_count_ * rows_;
    for (int64_t i = 0; i < all; ++i) {
      scratch_.max[i] = scratch_.total_max[i] = -kInfinity;
      scratch_.sum[i] = scratch_.total_sum[i] = 0.0f;
    }
    for (int64_t i = 0; i < all * value_stride_; i += kLanes) store(scratch_.acc + i, Vec{});
    for (int64_t i = 0; i < value_stride_; i += kLanes) store(scratch_.zeros + i, Vec{});
    for (int64_t head = 0; head < head_count_; ++head) {
      // Float queries take the product of the scales, rounded once for each number; of pairs, scores take it.
      double factor = args_.scale * static_cast<double>(head_value(args_.key_scale, head_begin_ + head, 1.0f));
      if (args_.softcap != 0.0) factor /= args_.softcap;
      scratch_.scale[head] = pairs_ ? static_cast<float>(factor) : 1.0f;
      for (int64_t row = 0; row < rows_; ++row) take_query(head, row, factor);
#if defined(PC_AMX)
      if (!by_tiles_) continue;
      pack_query_pairs(query_pairs() + head * rows_ * query_stride_, query_stride_, rows_, args_.key.dim,
                       query_panel(head));
#endif
    }
  }

  // The row in float32, multiplied by what its scores are multiplied by; for pairs as it is. Zeros behind it.
  void take_query(int64_t head, int64_t row, double factor) {
    const TokenArray& query = args_.query;
    const int64_t token = item_.query_begin + row / group_;
    const int64_t query_head = (head_begin_ + head) * group_ + row % group_;
    const char* source = query.data + token * query.token_stride + query_head * query.head_stride;
    const int64_t at = (head * rows_ + row) * query_stride_;
    if (pairs_) {
      uint16_t* target = query_pairs() + at;
      __builtin_memcpy(target, source, static_cast<size_t>(2 * query.dim));
      for (int64_t d = query.dim; d < query_stride_; ++d) target[d] = 0;
      return;
    }
    float* target = scratch_.query + at;
    with_float(query.type, [&]<Float T>() {
      for_each_vector<T>(source, query.dim, [&](int64_t d, Vec v, int64_t) { store(target + d, v); });
    });
    for (int64_t d = 0; d < query.dim; ++d) target[d] = static_cast<float>(static_cast<double>(target[d]) * factor);
    for (int64_t d = query.dim; d < query_stride_; ++d) target[d] = 0.0f;
  }

  [[nodiscard]] uint16_t* query_pairs() const { return reinterpret_cast<uint16_t*>(scratch_.query); }

  [[nodiscard]] uint32_t* query_panel(int64_t head) const {
    return scratch_.query_panel + head * query_stride_ / 2 * kDecodeRows;
  }

  // ---- tiles

  void visit_tiles() {
    Tile tiles[2];
    int current = 0;
    int64_t position = item_.key_begin;
    if (position < item_.key_end) locate_tile(position, tiles[0]);
    while (position < item_.key_end) {
      const int64_t next = tiles[current].start + kTileTokens;
      const bool more = next < item_.key_end;
      if (more) locate_tile(next, tiles[1 - current]);
      attend(tiles[current], more ? &tiles[1 - current] : nullptr);
      position = next;
      current = 1 - current;
      if (more && next % kFoldTokens == 0) fold();
    }
  }

  // Keys and values are met where they lie.
  [[nodiscard]] bool direct() const { return !packed_ && !by_tiles_; }

  // In the order in which it will most likely be visited.
  void locate_tile(int64_t position, Tile& tile) {
    locate(args_, blocks_, item_, position, tile);
    if (direct() && tile.first == 0 && tile.last == kTileTokens) set_order(tile, streams_);
  }

  void attend(Tile& tile, const Tile* next) {
    sight_.look_at(tile, scratch_);
    if (sight_.empty()) return;
    set_order(tile, sight_.whole() && direct() ? streams_ : kNatural);
    for (int64_t head = 0; head < head_count_; ++head) {
      score(tile, head);
      soften(tile, head);
    }
    for (int64_t head = 0; head < head_count_; ++head) weigh(tile, head, next);
  }

  [[nodiscard]] bool last(int64_t head) const { return head + 1 == head_count_; }

  [[nodiscard]] static Ahead next_head(const Cache& cache) { return {cache.head_stride, {}, 0}; }

  // With a mask, what comes next need not be there.
  [[nodiscard]] Ahead elsewhere(const Cache& cache, const int64_t* offsets, int64_t head) const {
    if (args_.mask != nullptr) return {};
    return {0, {head_base(cache, head), offsets}, cache.dim * size_of(cache.type)};
  }

  [[nodiscard]] char* head_base(const Cache& cache, int64_t head) const {
    return cache.data + (head_begin_ + head) * cache.head_stride;
  }

  [[nodiscard]] RowRange rows_at_work() const { return packed_ ? sight_.rows() : RowRange{0, rows_}; }

  // The rows of a head that attend to the tile, with all that they have; before and behind them nothing changes.
  [[nodiscard]] HeadRows rows_of(int64_t head) const {
    const RowRange rows = rows_at_work();
    const int64_t at = head * rows_ + rows.first;
    return {rows.first,
            rows.last - rows.first,
            scratch_.low + rows.first,
            scratch_.high + rows.first,
            scratch_.query + at * query_stride_,
            query_pairs() + at * query_stride_,
            query_stride_,
            scratch_.scores + at * kTileTokens,
            scratch_.weights + at * kTileTokens,
            scratch_.acc + at * value_stride_,
            value_stride_,
            scratch_.factor + at};
  }

  void score(const Tile& tile, int64_t head) {
    const Tokens keys{head_base(args_.key, head), tile.key_offsets};
    const HeadRows rows = rows_of(head);
    const Ahead values = elsewhere(args_.value, tile.value_offsets, direct() ? 0 : head);
    const int64_t dim = args_.key.dim;
    if (packed_) {
      with_float(args_.key.type, [&]<Float K>() {
        if constexpr (K == Float::BF16 && kHasPairs) {
          if (pairs_) return score_packed_pairs(*tiles_, rows, keys, sight_.use(), values, dim, scratch_);
        }
        score_packed<K>(rows, keys, sight_.use(), values, dim, scratch_);
      });
      return;
    }
    if constexpr (kHasTiles) {
      if (by_tiles_) {
        return score_tiles(*tiles_, rows, query_panel(head), keys, sight_.use(), values, dim, scratch_);
      }
    }
    const Ahead ahead = last(head) ? values : next_head(args_.key);
    if constexpr (kHasPairs) {
      if (pairs_) return score_pairs(rows, keys, ahead, dim);
    }
    with_float(args_.key.type, [&]<Float K>() { score_rows<K>(rows, keys, ahead, dim); });
  }

  // Scores to weights.
  void soften(const Tile& tile, int64_t head) {
    // Memory would rest meanwhile: a part of the values that are wanted later.
    Errand errand(!direct() ? Ahead{} : elsewhere(args_.value, tile.value_offsets, head), kTileTokens / 2);
    const RowRange rows = rows_at_work();
    for (int64_t row = rows.first; row < rows.last; ++row) {
      const int64_t query = row / group_, at = head * rows_ + row;
      RowScores scores{scratch_.low[row],
                       scratch_.high[row],
                       tile.order,
                       nullptr,
                       scratch_.scale[head],
                       static_cast<float>(args_.softcap),
                       0.0f,
                       0};
      if (args_.mask != nullptr) scores.keep = scratch_.keep + query * kTileTokens;
      if (args_.alibi_slopes.data != nullptr) {
        scores.slope = head_value(args_.alibi_slopes, (head_begin_ + head) * group_ + row % group_, 0.0f);
        const int64_t anchor = bias_anchor(sight_.window(), sight_.position(query), sight_.length(), scores.slope);
        scores.bias_begin = static_cast<int32_t>(tile.start - anchor);
      }
      scratch_.factor[at] = softmax_row(scores, scratch_.scores + at * kTileTokens,
                                        pairs_ ? scratch_.weights + at * kTileTokens : nullptr, scratch_.max[at],
                                        scratch_.sum[at], errand);
    }
  }

  void weigh(const Tile& tile, int64_t head, const Tile* next) {
    const Tokens values{head_base(args_.value, head), tile.value_offsets};
    const HeadRows rows = rows_of(head);
    const int64_t dim = args_.value.dim;
    const bool in_place = direct() && sight_.uniform();
    const Ahead next_keys = next == nullptr ? Ahead{} : elsewhere(args_.key, next->key_offsets, in_place ? 0 : head);
    if (!in_place) {
      with_float(args_.value.type, [&]<Float V>() {
        if constexpr (V == Float::BF16 && kHasPairs) {
          if (pairs_) {
            return weigh_packed_pairs(*tiles_, rows, values, sight_, next_keys, dim, group_, by_tiles_, scratch_);
          }
        }
        weigh_packed<V>(rows, values, sight_, next_keys, dim, group_, scratch_);
      });
      return;
    }
    const Ahead ahead = last(head) ? next_keys : next_head(args_.value);
    const Span span{sight_.use().first, sight_.use().last};
    if constexpr (kHasPairs) {
      if (pairs_) return weigh_pairs(rows, values, ahead, span, dim, scratch_.zeros);
    }
    with_float(args_.value.type, [&]<Float V>() { weigh_rows<V>(rows, values, ahead, span, dim); });
  }

  // ---- sums

  // What the rows have since the last fold joins the total.
  void fold() {
    if (!folded_) {
      for (int64_t i = 0; i < head_count_ * rows_ * value_stride_; i += kLanes) store(scratch_.total_acc + i, Vec{});
      folded_ = true;
    }
    for (int64_t row = 0; row < head_count_ * rows_; ++row) {
      float* acc = scratch_.acc + row * value_stride_;
      fold_row(scratch_.total_max[row], scratch_.total_sum[row], scratch_.total_acc + row * value_stride_,
               scratch_.max[row], scratch_.sum[row], acc, value_stride_);
      scratch_.max[row] = -kInfinity;
      scratch_.sum[row] = 0.0f;
      for (int64_t d = 0; d < value_stride_; d += kLanes) store(acc + d, Vec{});
    }
  }

  void finish() {
    if (folded_) fold();
    const float* row_max = folded_ ? scratch_.total_max : scratch_.max;
    const float* row_sum = folded_ ? scratch_.total_sum : scratch_.sum;
    const float* acc = folded_ ? scratch_.total_acc : scratch_.acc;
    for (int64_t i = 0; i < head_count_ * rows_; ++i) {
      const int64_t kv_head = head_begin_ + i / rows_;
      const int64_t query = i % rows_ / group_;
      const int64_t head = kv_head * group_ + i % rows_ % group_;
      const float* row = acc + i * value_stride_;
      if (item_.num_splits == 1) {
        finish_row(args_, head_options(args_, head, kv_head), item_.query_begin + query, head, sight_.position(query),
                   sight_.length(), row_max[i], row_sum[i], row);
        continue;
      }
      const int64_t at = (item_.partial + query) * args_.query.num_heads + head;
      batch_.partial_stats[2 * at] = row_max[i];
      batch_.partial_stats[2 * at + 1] = row_sum[i];
      for (int64_t d = 0; d < value_stride_; d += kLanes)
        store(batch_.partial_out + at * value_stride_ + d, load(row + d));
    }
  }

  const AttentionArgs& args_;
  const AttentionBatch& batch_;
  const PcWorkItem& item_;
  Indices blocks_;
  int64_t head_begin_, head_count_;
  int64_t group_;
  int64_t rows_;  // of one head
  int64_t value_stride_;
  Sight sight_;
  bool pairs_;     // all of bfloat16, and multiplied in pairs
  bool packed_;    // every tile is copied first
  bool by_tiles_;  // keys are read by AMX where they lie, values are copied
  int64_t query_stride_;
  const Order& streams_;
  Scratch scratch_;
  Tiles* tiles_ = nullptr;
  bool folded_ = false;
};

inline void attend_item(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item,
                        int64_t head_begin, int64_t head_count, float* scratch) {
  Pass(args, batch, item, head_begin, head_count, scratch).run();
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
