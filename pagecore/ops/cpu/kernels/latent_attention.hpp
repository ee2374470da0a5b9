// Latent attention of one work item: all heads of some queries over the tokens of the item.
//
//   for each tile of 64 tokens           addresses once, from the block table or a list of slots
//     rows      [64, width]              unpacked once for all heads; width = latent, rope and padding
//     scores^T  [64, rows]   = rows . queries        the next tile is prefetched meanwhile
//     softmax   [64, rows]               vectors across rows, so nothing is reduced across lanes
//     sums      [rows, latent] = factor * sums + weights . rows[:, :latent]
//
// A row is one (query, head) pair, with queries outermost. The values are the first numbers of the same unpacked row,
// so a token is read from memory once. Each sum adds its products in the order of depth in every block shape, so the
// bits of a row do not depend on the other rows.
#pragma once

#include "pagecore/ops/cpu/kernels/finish.hpp"
#include "pagecore/ops/cpu/kernels/latent_multiply.hpp"
#include "pagecore/ops/cpu/kernels/latent_softmax.hpp"
#include "pagecore/ops/cpu/kernels/panels.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Adjacent tokens that are multiplied where they are in the cache; a block has this many or more.
constexpr int kGroupTokens = 16;
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
    row_bytes_ = width_ * (pairs_ ? 2 : 4);
    // A bfloat16 row without padding is its own unpacked row. With many query rows, a copy costs less than it saves:
    // the query panel is then read once for the whole tile.
    in_place_ = pairs_ && rows_ <= kInPlaceRows && args.cache.format == LatentFormat::Plain &&
                latent_row_bytes(args.cache) == row_bytes_;
  }

  void run() {
    start();
    if (pairs_) {
      AmxTiles tiles;
      tiles_ = &tiles;
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
    for (int64_t i = 0; i < columns_; i += kLanes) {
      store(scratch_.max + i, splat(-kInfinity));
      store(scratch_.sum + i, Vec{});
      store(scratch_.factor + i, Vec{});
    }
    for (int64_t i = 0; i < columns_; ++i) scratch_.low[i] = scratch_.high[i] = 0;
    for (int64_t i = 0; i < columns_ * latent_; i += kLanes) store(scratch_.acc + i, Vec{});
    for (int64_t row = 0; row < columns_; ++row) load_query(row);
  }

  // Writes column `row` of the query panel: latent, zeros, rope, zeros; all zeros for a padding column.
  void load_query(int64_t row) {
    const int64_t token = item_.query_begin + row / heads_, head = row % heads_;
    float* numbers = scratch_.floats;  // free until the first tile
    for (int64_t d = 0; d < width_; d += kLanes) store(numbers + d, Vec{});
    if (row < rows_) {
      load_part(args_.call.query, token, head, numbers);
      load_part(args_.query_rope, token, head, numbers + latent_);
    }
    if (!pairs_) {
      for (int64_t d = 0; d < width_; ++d) scratch_.query[d * columns_ + row] = numbers[d];
      return;
    }
    auto* panel = reinterpret_cast<uint32_t*>(scratch_.query);
    const auto* bits = reinterpret_cast<const uint32_t*>(numbers);
    for (int64_t pair = 0; pair < width_ / 2; ++pair) {
      panel[pair * columns_ + row] = bits[2 * pair] >> 16 | bits[2 * pair + 1];  // of widened bfloat16
    }
  }

  PC_FORCE_INLINE static void load_part(const TokenArray& part, int64_t token, int64_t head, float* to) {
    const char* from = part.data + token * part.token_stride + head * part.head_stride;
    with_float(part.type, [&]<Float T>() {
      for_each_vector<T>(from, part.dim, [&](int64_t d, Vec v, int64_t count) {
        float numbers[kLanes];
        store(numbers, v);
        __builtin_memcpy(to + d, numbers, static_cast<size_t>(4 * count));
      });
    });
  }

  // ---- tiles of tokens

  void locate(int64_t begin, LatentTile& tile) const {
    const int64_t end = begin + kTileTokens < item_.key_end ? begin + kTileTokens : item_.key_end;
    if (args_.sparse) {
      locate_slots(args_, list_, begin, end, tile);
    } else {
      locate_tokens(args_, list_, begin, end, tile);
    }
  }

  void visit_tiles() {
    LatentTile tiles[2];
    int current = 0;
    if (item_.key_begin < item_.key_end) locate(item_.key_begin, tiles[0]);
    for (int64_t position = item_.key_begin; position < item_.key_end; position += kTileTokens, current = 1 - current) {
      LatentTile& next = tiles[1 - current];
      next.count = 0;
      if (position + kTileTokens < item_.key_end) locate(position + kTileTokens, next);
      if (tiles[current].count > 0) attend(tiles[current], next);
    }
  }

  void attend(const LatentTile& tile, const LatentTile& next) {
    const bool whole = see_tile(args_, batch_, item_, tile, scratch_);
    RowPrefetch prefetch(next.latent, next.count, latent_row_bytes(args_.cache));
    unpack(tile);
    score(prefetch);
    const auto scale = static_cast<float>(args_.call.scale);
    for (int64_t column = 0; column < columns_; column += kLanes) {
      softmax_column(scratch_, columns_, column, tile.count, whole && column + kLanes <= rows_, scale);
      if (pairs_) {
        if constexpr (kHasPairs) transpose_weight_pairs(scratch_, columns_, column);
      } else {
        transpose_weights(scratch_, columns_, column);
      }
    }
    accumulate(tile, whole, prefetch);
  }

  // Finds or makes the unpacked rows of a tile, a group of 16 tokens at a time. Rows past the last token become zeros.
  void unpack(const LatentTile& tile) {
    for (int first = 0; first < kTileTokens; first += kGroupTokens) {
      char* to = unpacked_ + first * row_bytes_;
      const int count = tile.count - first < kGroupTokens ? tile.count - first : kGroupTokens;
      group_[first / kGroupTokens] = is_unpacked(tile, first, count) ? tile.latent[first] : to;
      if (group_[first / kGroupTokens] == to) unpack_group(tile, first, count, to);
      const int64_t offset = group_[first / kGroupTokens] - unpacked_;
      for (int t = 0; t < kGroupTokens; ++t) offsets_[first + t] = offset + t * row_bytes_;
    }
  }

  // True if the rows of a group are adjacent in the cache, in the form of unpacked rows.
  [[nodiscard]] bool is_unpacked(const LatentTile& tile, int first, int count) const {
    if (!in_place_ || count != kGroupTokens) return false;
    for (int t = 1; t < count; ++t) {
      if (tile.latent[first + t] != tile.latent[first] + t * row_bytes_) return false;
    }
    return true;
  }

  void unpack_group(const LatentTile& tile, int first, int count, char* to) {
    for (int t = 0; t < kGroupTokens; ++t, to += row_bytes_) {
      if (t >= count) {
        __builtin_memset(to, 0, static_cast<size_t>(row_bytes_));
        continue;
      }
      const LatentRow row{tile.latent[first + t], tile.rope[first + t]};
      if (pairs_) {
        unpack_halves(args_.cache, row, reinterpret_cast<uint16_t*>(to));
      } else {
        unpack_floats(args_.cache, row, scratch_.halves, reinterpret_cast<float*>(to));
      }
    }
  }

  void score(RowPrefetch& prefetch) {
    const int64_t tokens = in_place_ ? kGroupTokens : kTileTokens;
    for (int64_t first = 0; first < kTileTokens; first += tokens) {
      const TileProduct product{group_[first / kGroupTokens],
                                width_,
                                scratch_.query,
                                columns_,
                                scratch_.scores + first * columns_,
                                columns_,
                                nullptr,
                                tokens,
                                width_,
                                columns_};
      multiply(product, prefetch);
    }
  }

  void multiply(const TileProduct& product, RowPrefetch& prefetch) {
    if (pairs_) return multiply_tile_pairs(*tiles_, product, prefetch);
    multiply_tile_floats(product, prefetch);
  }

  // Packs a whole strip of bfloat16 values. Every row of a tile exists: those past the last token are zeros.
  void pack_whole_strip(int64_t column) {
    if constexpr (kHasPairs) {
      auto* to = reinterpret_cast<float*>(scratch_.values);
      const char* base = unpacked_ + 2 * column;
      for (int t = 0; t < kTileTokens; t += 2, to += kStripColumns) {
        const auto a = (Halves)load(reinterpret_cast<const float*>(base + offsets_[t]));
        const auto b = (Halves)load(reinterpret_cast<const float*>(base + offsets_[t + 1]));
        store(to, (Vec)zip<0>(a, b, TwiceLanes{}));
        store(to + kLanes, (Vec)zip<kLanes>(a, b, TwiceLanes{}));
      }
    }
  }

  // Packs a strip of values of tokens [first, last); the others count as zeros. Returns true if all are finite.
  bool pack(int64_t column, int64_t columns, int first, int last) {
    const TokenRows rows{unpacked_ + column * (pairs_ ? 2 : 4), offsets_};
    const TileUse use{first, last, nullptr};
    if (pairs_) return pack_value_pairs(rows, use, columns, reinterpret_cast<uint32_t*>(scratch_.values));
    return pack_values<Float::F32>(rows, use, columns, scratch_.values);
  }

  // In a strip with infinities or NaN to which rows attend differently, the values are packed for each row, because
  // 0 * NaN must not reach a row that does not attend to the NaN.
  void accumulate(const LatentTile& tile, bool whole, RowPrefetch& prefetch) {
    for (int64_t column = 0; column < latent_; column += kStripColumns) {
      const int64_t columns = latent_ - column < kStripColumns ? latent_ - column : kStripColumns;
      if (pairs_ && whole && columns == kStripColumns) {
        pack_whole_strip(column);
        multiply_values(column, columns, 0, rows_, prefetch);
        continue;
      }
      if (pack(column, columns, 0, tile.count) || whole) {
        multiply_values(column, columns, 0, rows_, prefetch);
        continue;
      }
      for (int64_t row = 0; row < rows_; ++row) {
        pack(column, columns, scratch_.low[row], scratch_.high[row]);
        multiply_values(column, columns, row, 1, prefetch);
      }
    }
  }

  void multiply_values(int64_t column, int64_t columns, int64_t row, int64_t count, RowPrefetch& prefetch) {
    const float* weights = scratch_.weights + row * (pairs_ ? kTileTokens / 2 : kTileTokens);
    const TileProduct product{
        weights, kTileTokens,           scratch_.values, columns,     scratch_.acc + row * latent_ + column,
        latent_, scratch_.factor + row, count,           kTileTokens, columns};
    multiply(product, prefetch);
  }

  // ---- after the last tile

  void finish() {
    const int64_t length = batch_.seq_lens[item_.sequence];
    const int64_t position = length - (batch_.cu_query_lens[item_.sequence + 1] - item_.query_begin);
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t query = row / heads_, head = row % heads_;
      const float* acc = scratch_.acc + row * latent_;
      if (item_.num_splits == 1) {
        finish_row(args_.call, head_options(args_.call, head, 0), item_.query_begin + query, head, position + query,
                   length, scratch_.max[row], scratch_.sum[row], acc);
      } else {
        store_partial(batch_, (item_.partial + query) * heads_ + head, scratch_.max[row], scratch_.sum[row], acc,
                      latent_);
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
  char* unpacked_;     // [64, row_bytes_], for rows that are not read in place
  int64_t row_bytes_;  // of an unpacked row
  bool in_place_;
  const char* group_[kTileTokens / kGroupTokens];
  int64_t offsets_[kTileTokens];  // of the unpacked rows, from unpacked_
  AmxTiles* tiles_ = nullptr;
};

inline void attend_latent(const LatentArgs& args, const AttentionBatch& batch, const PcWorkItem& item, float* scratch) {
  LatentPass(args, batch, item, scratch).run();
}

inline void read_latent_row(const LatentCache& cache, int64_t block, int64_t offset, float factor, char* out,
                            Float type) {
  alignas(64) uint16_t halves[kLatentWidthMax];
  alignas(64) float numbers[kLatentWidthMax];
  unpack_floats(cache, latent_row(cache, block, offset), halves, numbers);
  const float* rope = numbers + latent_width(cache);
  for (int64_t d = 0; d < cache.rope_dim; ++d) numbers[cache.latent_dim + d] = rope[d];
  const int64_t dim = cache.latent_dim + cache.rope_dim;
  with_float(type, [&]<Float T>() {
    for (int64_t d = 0; d < dim; d += kLanes) {
      store_part<T>(out, d, load(numbers + d) * factor, dim - d < kLanes ? dim - d : kLanes);
    }
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
