// Attention of one item: the queries of one tile, all heads of one pass, over the item's keys.
//
//   for each tile of 64 keys                     offsets once, from the block table
//     for each key head                          so that the cache is read as it lies in memory
//       scores    rows x 64                      straight from the cache, or from a widened copy of the tile
//       weights   one softmax step for each row
//       values    rows x value dim
//
// A row is one (query, head of the group), queries outermost. Copies are taken where many rows make them pay, where
// dims are no whole vectors, and where a tile holds tokens that some row must not see.
#pragma once

#include "pagecore/ops/cpu/kernels/finish.hpp"
#include "pagecore/ops/cpu/kernels/pack.hpp"
#include "pagecore/ops/cpu/kernels/tile.hpp"
#include "pagecore/ops/cpu/kernels/values.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Rows from which on a widened copy of the tile costs less than widening it for each block of rows.
constexpr int64_t kPackRows = 4 * kBlockRows;

class Pass {
 public:
  Pass(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item, int64_t head_begin,
       int64_t head_count, float* memory)
      : args_(args),
        batch_(batch),
        item_(item),
        window_(make_window(args.causal, args.window_left, args.window_right)),
        blocks_(args.table.row(batch.rows[item.sequence])),
        head_begin_(head_begin),
        head_count_(head_count),
        group_(args.query.num_heads / args.key.num_heads),
        rows_(item.query_count * group_),
        length_(batch.seq_lens[item.sequence]),
        position_(length_ - (batch.cu_query_lens[item.sequence + 1] - item.query_begin)),
        key_stride_(padded(args.key.dim)),
        value_stride_(padded(args.value.dim)) {
    carve(reinterpret_cast<uintptr_t>(memory), head_count, rows_, args.key.dim, args.value.dim, scratch_);
  }

  void run() {
    start();
    Tile tiles[2];
    int current = 0;
    int64_t position = item_.key_begin;
    if (position < item_.key_end) locate(args_, blocks_, item_, position, tiles[0]);
    while (position < item_.key_end) {
      const Tile& tile = tiles[current];
      const int64_t next = tile.start + kTileTokens;
      const bool more = next < item_.key_end;
      if (more) locate(args_, blocks_, item_, next, tiles[1 - current]);
      rows_of_tile(tile);
      for (int64_t head = 0; head < head_count_; ++head) {
        const bool last_head = head + 1 == head_count_;
        const Tile* ahead = !last_head ? &tile : more ? &tiles[1 - current] : nullptr;
        attend(tile, head, ahead, last_head ? 0 : head + 1);
      }
      position = next;
      current = 1 - current;
      if (more && next % kFoldTokens == 0) fold();
    }
    finish();
  }

 private:
  // ---- before the first tile

  void start() {
    const int64_t all = head_count_ * rows_;
    for (int64_t i = 0; i < all; ++i) {
      scratch_.max[i] = scratch_.total_max[i] = -kInfinity;
      scratch_.sum[i] = scratch_.total_sum[i] = 0.0f;
    }
    for (int64_t i = 0; i < all * value_stride_; i += kLanes) store(scratch_.acc + i, Vec{});
    for (int64_t head = 0; head < head_count_; ++head) {
      // The product of the scales is rounded once for each number, not once for all of them.
      double factor = args_.scale * static_cast<double>(head_value(args_.key_scale, head_begin_ + head, 1.0f));
      if (args_.softcap != 0.0) factor /= args_.softcap;
      for (int64_t row = 0; row < rows_; ++row) scale_query(head, row, factor);
    }
  }

  void scale_query(int64_t head, int64_t row, double factor) {
    const Rows& query = args_.query;
    const int64_t token = item_.query_begin + row / group_;
    const int64_t query_head = (head_begin_ + head) * group_ + row % group_;
    const char* source = query.data + token * query.token_stride + query_head * query.head_stride;
    float* target = scratch_.query + (head * rows_ + row) * key_stride_;
    with_float(query.type, [&]<Float T>() {
      for_each_vector<T>(source, query.dim, [&](int64_t d, Vec v, int64_t) { store(target + d, v); });
    });
    for (int64_t d = 0; d < query.dim; ++d) target[d] = static_cast<float>(static_cast<double>(target[d]) * factor);
    for (int64_t d = query.dim; d < key_stride_; ++d) target[d] = 0.0f;
  }

  // ---- who attends to what

  // low, high and keep of each row; the same for every head.
  void rows_of_tile(const Tile& tile) {
    uniform_ = args_.mask == nullptr;
    use_ = {static_cast<int>(kTileTokens), 0, nullptr};
    for (int64_t query = 0; query < item_.query_count; ++query) {
      const int64_t position = position_ + query;
      const KeyRange keys = attended_keys(window_, position, position, length_);
      const int low = within_tile(keys.begin, tile);
      const int high = within_tile(keys.end, tile);
      for (int64_t g = 0; g < group_; ++g) {
        scratch_.low[query * group_ + g] = low;
        scratch_.high[query * group_ + g] = high;
      }
      uniform_ = uniform_ && low == scratch_.low[0] && high == scratch_.high[0];
      if (low >= high) continue;
      use_.first = low < use_.first ? low : use_.first;
      use_.last = high > use_.last ? high : use_.last;
    }
    if (args_.mask != nullptr && use_.first < use_.last) mask_of_tile(tile);
  }

  [[nodiscard]] static int within_tile(int64_t position, const Tile& tile) {
    const int64_t t = position - tile.start;
    return static_cast<int>(t < tile.first ? tile.first : t > tile.last ? tile.last : t);
  }

  void mask_of_tile(const Tile& tile) {
    for (int64_t t = 0; t < kTileTokens; ++t) used_[t] = 0;
    use_.used = used_;
    const int64_t first_query = item_.query_begin - batch_.cu_query_lens[item_.sequence];
    for (int64_t query = 0; query < item_.query_count; ++query) {
      const uint8_t* mask =
          args_.mask + batch_.mask_starts[item_.sequence] + (first_query + query) * length_ + tile.start;
      uint8_t* keep = scratch_.keep + query * kTileTokens;
      for (int t = 0; t < kTileTokens; ++t) {
        const bool attended = t >= scratch_.low[query * group_] && t < scratch_.high[query * group_] && mask[t] != 0;
        keep[t] = attended ? 1 : 0;
        used_[t] |= keep[t];
      }
    }
  }

  // ---- one tile, one head

  void attend(const Tile& tile, int64_t head, const Tile* ahead_tile, int64_t ahead_head) {
    if (use_.first >= use_.last) return;
    const int64_t first_row = head * rows_;
    const Tokens keys{head_base(args_.key, head), tile.key_offsets};
    const Tokens values{head_base(args_.value, head), tile.value_offsets};
    Ahead key_ahead{}, value_ahead{};
    if (ahead_tile != nullptr && args_.mask == nullptr) {
      key_ahead = {{head_base(args_.key, ahead_head), ahead_tile->key_offsets},
                   args_.key.dim * size_of(args_.key.type)};
      value_ahead = {{head_base(args_.value, ahead_head), ahead_tile->value_offsets},
                     args_.value.dim * size_of(args_.value.type)};
    }
    score(keys, key_ahead, scratch_.query + first_row * key_stride_);
    soften(tile, head);
    const RowSums rows{scratch_.scores, scratch_.acc + first_row * value_stride_, value_stride_, scratch_.factor};
    weigh(values, value_ahead, rows);
  }

  [[nodiscard]] char* head_base(const Cache& cache, int64_t head) const {
    return cache.data + (head_begin_ + head) * cache.head_stride;
  }

  void score(Tokens keys, const Ahead& ahead, const float* query) {
    const int64_t dim = args_.key.dim;
    const bool packed = rows_ >= kPackRows || dim % kLanes != 0 || args_.mask != nullptr;
    if (!packed) {
      with_float(args_.key.type,
                 [&]<Float K>() { score_tile<K>(query, key_stride_, rows_, keys, ahead, dim, scratch_); });
      return;
    }
    with_float(args_.key.type, [&]<Float K>() { pack_tile<K>(keys, use_, dim, scratch_.key); });
    int64_t offsets[kTileTokens];
    keys = packed_tokens(scratch_.key, key_stride_, offsets);
    score_tile<Float::F32>(query, key_stride_, rows_, keys, ahead, (dim + kLanes - 1) / kLanes * kLanes, scratch_);
  }

  // Scores to weights.
  void soften(const Tile& tile, int64_t head) {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t query = row / group_;
      RowScores scores{scratch_.low[row], scratch_.high[row], nullptr, static_cast<float>(args_.softcap), 0.0f, 0};
      if (args_.mask != nullptr) scores.keep = scratch_.keep + query * kTileTokens;
      if (args_.alibi_slopes.data != nullptr) {
        scores.slope = head_value(args_.alibi_slopes, (head_begin_ + head) * group_ + row % group_, 0.0f);
        const int64_t anchor = bias_anchor(window_, position_ + query, length_, scores.slope);
        scores.bias_begin = static_cast<int32_t>(tile.start - anchor);
      }
      const int64_t at = head * rows_ + row;
      scratch_.factor[row] =
          softmax_row(scores, scratch_.scores + row * kTileTokens, scratch_.max[at], scratch_.sum[at]);
    }
  }

  void weigh(Tokens values, const Ahead& ahead, const RowSums& rows) {
    const int64_t dim = args_.value.dim;
    const int64_t vectors = (dim + kLanes - 1) / kLanes;
    const bool packed = rows_ >= kPackRows || dim % kLanes != 0 || !uniform_;
    if (!packed) {
      with_float(args_.value.type, [&]<Float V>() { value_tile<V>(rows, rows_, values, ahead, vectors, scratch_); });
      return;
    }
    const bool finite =
        with_float(args_.value.type, [&]<Float V>() { return pack_tile<V>(values, use_, dim, scratch_.value); });
    int64_t offsets[kTileTokens];
    values = packed_tokens(scratch_.value, value_stride_, offsets);
    if (finite || uniform_) {
      value_tile<Float::F32>(rows, rows_, values, ahead, vectors, scratch_);
    } else {
      value_tile_by_token(rows, rows_, item_.query_count, values, vectors, args_.mask != nullptr, scratch_);
    }
  }

  static Tokens packed_tokens(const float* packed, int64_t stride, int64_t (&offsets)[kTileTokens]) {
    for (int t = 0; t < kTileTokens; ++t) offsets[t] = t * stride * static_cast<int64_t>(sizeof(float));
    return {reinterpret_cast<const char*>(packed), offsets};
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
        finish_row(args_, head_options(args_, head, kv_head), item_.query_begin + query, head, position_ + query,
                   length_, row_max[i], row_sum[i], row);
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
  Window window_;
  Indices blocks_;
  int64_t head_begin_, head_count_;
  int64_t group_;
  int64_t rows_;  // of one head
  int64_t length_;
  int64_t position_;  // of the item's first query
  int64_t key_stride_, value_stride_;
  Scratch scratch_;
  bool folded_ = false;
  bool uniform_ = true;  // of the tile at hand: every row attends to the same keys
  TileUse use_{};        // of the tile at hand
  uint8_t used_[kTileTokens];
};

inline void attend_item(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item,
                        int64_t head_begin, int64_t head_count, float* scratch) {
  Pass(args, batch, item, head_begin, head_count, scratch).run();
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
