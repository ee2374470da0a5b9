// Latent attention of one work item: all heads of some queries over the tokens of the item.
//
//   for each tile of 64 tokens           addresses once, from the block table or a list of slots
//     rows      [64, width]              unpacked once for all heads; width = latent, rope and padding
//     scores^T  [64, rows]   = rows . queries        the next tile is prefetched meanwhile
//     softmax   [64, rows]               vectors across rows, so nothing is reduced across lanes
//     sums      [rows, latent] = factor * sums + weights . rows[:, :latent]
//
// A row is one (query, head) pair, with queries outermost. The values are the first numbers of the same unpacked row,
// so a token is read from memory once. Tiles start at multiples of 64, sums are folded at multiples of kFoldTokens, and
// each sum adds its products in an order that only the depth determines, so the bits of a row depend neither on the
// other rows nor on splits at multiples of kFoldTokens.
#pragma once

#include "pagecore/ops/cpu/kernels/latent/latent_query.hpp"
#include "pagecore/ops/cpu/kernels/latent/latent_softmax.hpp"
#include "pagecore/ops/cpu/kernels/products/finish.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Up to this number of query rows, AMX reads the rows of a cache in place. With more, a copy costs less than it saves:
// the query panel is then read once for the whole tile.
constexpr int64_t kInPlaceRows = 32;

class LatentPass {
 public:
  LatentPass(const LatentArgs& args, const AttentionBatch& batch, const PcWorkItem& item, float* memory)
      : args_(args),
        batch_(batch),
        item_(item),
        list_(args.call.table.row(batch.rows[item.sequence])),
        heads_(args.call.query.num_heads),
        rows_(item.query_count * heads_),
        columns_(padded(rows_)),
        latent_(latent_width(args.cache)),
        width_(latent_row_width(args.cache)),
        pairs_(takes_pairs(args)) {
    carve_latent(reinterpret_cast<uintptr_t>(memory), rows_, latent_, width_, scratch_);
    unpacked_ = reinterpret_cast<char*>(pairs_ ? reinterpret_cast<float*>(scratch_.halves) : scratch_.floats);
    tile_.stride = width_ * (pairs_ ? 2 : 4);
    // A bfloat16 row without padding is its own unpacked row.
    in_place_ = pairs_ && (kHasQuads || rows_ <= kInPlaceRows) && args.cache.format == LatentFormat::Plain &&
                latent_row_bytes(args.cache) == tile_.stride;
  }

  void run() {
    start();
    if (pairs_) {
      AmxTiles tiles;
      amx_ = &tiles;
      visit_tiles();
    } else {
      visit_tiles();
    }
    finish();
  }

 private:
  // True if the call multiplies pairs of bfloat16: softmax weights are then rounded to bfloat16, as the output is.
  static bool takes_pairs(const LatentArgs& args) {
    const bool exact = args.cache.format != LatentFormat::Plain || args.cache.type == Float::BF16;
    return kHasPairs && exact && args.call.query.type == Float::BF16 && args.call.out.type == Float::BF16;
  }

  void start() {
    for (int64_t i = 0; i < columns_; ++i) {
      scratch_.max[i] = scratch_.total_max[i] = -kInfinity;
      scratch_.sum[i] = scratch_.total_sum[i] = scratch_.factor[i] = 0.0f;
      scratch_.low[i] = scratch_.high[i] = 0;
    }
    for (int64_t i = 0; i < columns_ * latent_; i += kLanes) store(scratch_.acc + i, Vec{});
    const LatentQueries queries{args_.call.query, args_.query_rope, item_.query_begin, item_.query_count,
                                latent_,          width_,           columns_};
    if (pairs_) {
      load_query_pairs(queries, scratch_.query, scratch_.halves);
    } else {
      load_queries(queries, scratch_.query, scratch_.floats);
    }
  }

  // ---- tiles of tokens

  // Locates the part of the tile of `position` that the item covers.
  void locate(int64_t position, LatentTile& tile) const {
    tile.start = position / kTileTokens * kTileTokens;
    const int64_t end = tile.start + kTileTokens < item_.key_end ? tile.start + kTileTokens : item_.key_end;
    if (args_.sparse) {
      locate_slots(args_, list_, position, end, tile);
    } else {
      locate_tokens(args_, list_, position, end, tile);
    }
  }

  void visit_tiles() {
    LatentTile tiles[2];
    int current = 0;
    int64_t position = item_.key_begin;
    if (position < item_.key_end) locate(position, tiles[0]);
    while (position < item_.key_end) {
      LatentTile& next = tiles[1 - current];
      position = tiles[current].start + kTileTokens;
      next.first = next.last = 0;
      if (position < item_.key_end) locate(position, next);
      if (tiles[current].first < tiles[current].last) attend(tiles[current], next);
      current = 1 - current;
      if (position < item_.key_end && position % kFoldTokens == 0) fold();
    }
  }

  void attend(const LatentTile& tile, const LatentTile& next) {
    const bool whole = see_tile(args_, batch_, item_, tile, scratch_);
    RowPrefetch prefetch(next.latent + next.first, next.last - next.first, latent_row_bytes(args_.cache));
    score(tile, next, prefetch);
    const bool by_quads = kHasQuads && pairs_;  // which scale the scores
    const float scale = by_quads ? 1.0f : static_cast<float>(args_.call.scale);
    for (int64_t column = 0; column < columns_; column += kLanes) {
      const bool all = whole && column + kLanes <= rows_;
      const TileScores scores{tile.first, tile.last, all, by_quads && all && tile.last - tile.first == kTileTokens,
                              scale};
      if constexpr (kHasPairs) {
        if (pairs_) {
          softmax_column_pairs(scratch_, columns_, column, scores);
          continue;
        }
      }
      softmax_column(scratch_, columns_, column, scores);
    }
    accumulate(tile, whole, prefetch);
  }

  // Finds or makes the unpacked rows of a group of 16 tokens. Rows that the item does not cover become zeros.
  void unpack(const LatentTile& tile, int group) {
    const int begin = group * kGroupTokens;
    char* to = unpacked_ + begin * tile_.stride;
    if (is_unpacked(tile, begin)) {
      tile_.group[group] = tile.latent[begin];
      return;
    }
    tile_.group[group] = to;
    for (int t = begin; t < begin + kGroupTokens; ++t, to += tile_.stride) {
      if (t < tile.first || t >= tile.last) {
        __builtin_memset(to, 0, static_cast<size_t>(tile_.stride));
        continue;
      }
      const LatentRow row{tile.latent[t], tile.rope[t]};
      if (pairs_) {
        unpack_halves(args_.cache, row, reinterpret_cast<uint16_t*>(to));
      } else {
        unpack_floats(args_.cache, row, scratch_.halves, reinterpret_cast<float*>(to));
      }
    }
  }

  // True if the rows of a group are adjacent in the cache, in the form of unpacked rows.
  [[nodiscard]] bool is_unpacked(const LatentTile& tile, int begin) const {
    if (!in_place_ || begin < tile.first || begin + kGroupTokens > tile.last) return false;
    bool adjacent = true;
    for (int t = 1; t < kGroupTokens; ++t) {
      adjacent &= tile.latent[begin + t] == tile.latent[begin] + t * tile_.stride;
    }
    return adjacent;
  }

  void score(const LatentTile& tile, const LatentTile& next, RowPrefetch& prefetch) {
    if constexpr (kHasQuads) {
      if (pairs_) return score_by_quads(tile, next);
    }
    const int groups = in_place_ ? 1 : kTileGroups;  // that are multiplied together
    for (int group = 0; group < kTileGroups; ++group) unpack(tile, group);
    for (int group = 0; group < kTileGroups; group += groups) {
      prefetch.steps(8 * groups);
      multiply({tile_.group[group], width_, scratch_.query, columns_, scratch_.scores + group * kGroupTokens * columns_,
                columns_, nullptr, groups * kGroupTokens, width_, columns_},
               prefetch);
    }
  }

  // Each group is multiplied right after it has been unpacked.
  void score_by_quads(const LatentTile& tile, const LatentTile& next) {
    const int64_t steps = width_ / kPairDepth;
    const RowsAhead ahead{next.latent + next.first, next.last - next.first,
                          (latent_row_bytes(args_.cache) + steps - 1) / steps};
    const QuadScores scores{scratch_.query,  width_,      columns_, static_cast<float>(args_.call.scale),
                            scratch_.scores, scratch_.top};
    for (int64_t column = 0; column < columns_; column += kLanes) store(scratch_.top + column, splat(-kInfinity));
    tile_.first = tile.first / kGroupTokens;
    tile_.last = (tile.last + kGroupTokens - 1) / kGroupTokens;
    for (int group = tile_.first; group < tile_.last; ++group) {
      const int begin = group * kGroupTokens, end = begin + kGroupTokens;
      unpack(tile, group);
      score_group(tile_, group, tile.first > begin ? tile.first - begin : 0,
                  tile.last < end ? tile.last - begin : kGroupTokens, scores, ahead);
    }
  }

  void multiply(const TileProduct& product, RowPrefetch& prefetch) {
    if (pairs_) return multiply_tile_pairs(*amx_, product, prefetch);
    multiply_tile_floats(product, prefetch);
  }

  // In a tile with infinities or NaN to which rows attend differently, the values are packed for each row, because
  // 0 * NaN must not reach a row that does not attend to the NaN.
  void accumulate(const LatentTile& tile, bool whole, RowPrefetch& prefetch) {
    if constexpr (kHasQuads) {
      if (pairs_ && (whole || are_finite(tile_, latent_))) {
        const auto* weights = reinterpret_cast<const uint32_t*>(scratch_.weights);
        return add_values(tile_, latent_, {weights, scratch_.acc, latent_, scratch_.factor}, columns_);
      }
    }
    for (int64_t column = 0; column < latent_; column += kStripColumns) {
      const int64_t columns = latent_ - column < kStripColumns ? latent_ - column : kStripColumns;
      if (pairs_ && whole && columns == kStripColumns) {
        pack_whole_strip(column, prefetch);
        multiply_values(column, columns, 0, rows_, prefetch);
        continue;
      }
      if (pack(column, columns, tile.first, tile.last) || whole) {
        multiply_values(column, columns, 0, rows_, prefetch);
        continue;
      }
      for (int64_t row = 0; row < rows_; ++row) {
        pack(column, columns, scratch_.low[row], scratch_.high[row]);
        multiply_values(column, columns, row, 1, prefetch);
      }
    }
  }

  // Packs a whole strip of bfloat16 values. Every row of a tile exists: those that the item does not cover are zeros.
  void pack_whole_strip(int64_t column, [[maybe_unused]] RowPrefetch& prefetch) {
    if constexpr (kHasPairs) {
      auto* to = reinterpret_cast<float*>(scratch_.values);
      for (const char* values : tile_.group) {
        values += 2 * column;
        for (int t = 0; t < kGroupTokens; t += 2, values += 2 * tile_.stride, to += kStripColumns) {
          if (t % 4 == 0) prefetch.steps(1);
          const auto a = (Halves)load(reinterpret_cast<const float*>(values));
          const auto b = (Halves)load(reinterpret_cast<const float*>(values + tile_.stride));
          store(to, (Vec)zip<0>(a, b, TwiceLanes{}));
          store(to + kLanes, (Vec)zip<kLanes>(a, b, TwiceLanes{}));
        }
      }
    }
  }

  // Packs a strip of values of tokens [first, last); the others count as zeros. Returns true if all are finite.
  bool pack(int64_t column, int64_t columns, int first, int last) {
    int64_t offsets[kTileTokens];  // from the first group
    for (int t = 0; t < kTileTokens; ++t) {
      offsets[t] = tile_.group[t / kGroupTokens] - tile_.group[0] + t % kGroupTokens * tile_.stride;
    }
    const TokenRows rows{tile_.group[0] + column * (pairs_ ? 2 : 4), offsets};
    const TileUse use{first, last, nullptr};
    if (pairs_) return pack_value_pairs(rows, use, columns, reinterpret_cast<uint32_t*>(scratch_.values));
    return pack_values<Float::F32>(rows, use, columns, scratch_.values);
  }

  void multiply_values(int64_t column, int64_t columns, int64_t row, int64_t count, RowPrefetch& prefetch) {
    const float* weights = scratch_.weights + row * (pairs_ ? kTileTokens / 2 : kTileTokens);
    const TileProduct product{
        weights, kTileTokens,           scratch_.values, columns,     scratch_.acc + row * latent_ + column,
        latent_, scratch_.factor + row, count,           kTileTokens, columns};
    multiply(product, prefetch);
  }

  // ---- running sums

  // Adds the sums since the last fold to the totals, and clears the sums.
  void fold() {
    if (!folded_) {
      for (int64_t i = 0; i < rows_ * latent_; i += kLanes) store(scratch_.total_acc + i, Vec{});
    }
    folded_ = true;
    for (int64_t row = 0; row < rows_; ++row) {
      float* acc = scratch_.acc + row * latent_;
      fold_row(scratch_.total_max[row], scratch_.total_sum[row], scratch_.total_acc + row * latent_, scratch_.max[row],
               scratch_.sum[row], acc, latent_);
      scratch_.max[row] = -kInfinity;
      scratch_.sum[row] = 0.0f;
      for (int64_t d = 0; d < latent_; d += kLanes) store(acc + d, Vec{});
    }
  }

  void finish() {
    if (folded_) fold();
    const float* row_max = folded_ ? scratch_.total_max : scratch_.max;
    const float* row_sum = folded_ ? scratch_.total_sum : scratch_.sum;
    const float* acc = folded_ ? scratch_.total_acc : scratch_.acc;
    const int64_t length = batch_.seq_lens[item_.sequence];
    const int64_t position = length - (batch_.cu_query_lens[item_.sequence + 1] - item_.query_begin);
    for (int64_t row = 0; row < rows_; ++row, acc += latent_) {
      const int64_t query = row / heads_, head = row % heads_;
      if (item_.num_splits == 1) {
        finish_row(args_.call, head_options(args_.call, head, 0), item_.query_begin + query, head, position + query,
                   length, row_max[row], row_sum[row], acc);
      } else {
        store_partial(batch_, (item_.partial + query) * heads_ + head, row_max[row], row_sum[row], acc, latent_);
      }
    }
  }

  const LatentArgs& args_;
  const AttentionBatch& batch_;
  const PcWorkItem& item_;
  Indices list_;  // blocks of the sequence, or slots of the query
  int64_t heads_;
  int64_t rows_;
  int64_t columns_;
  int64_t latent_;
  int64_t width_;
  bool pairs_;
  LatentScratch scratch_;
  char* unpacked_;  // [64, width], for rows that are not read in place
  bool in_place_;
  bool folded_ = false;
  TileRows tile_;
  AmxTiles* amx_ = nullptr;
};

inline void attend_latent(const LatentArgs& args, const AttentionBatch& batch, const PcWorkItem& item, float* scratch) {
  LatentPass(args, batch, item, scratch).run();
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
