// Scores and values of one tile and one head as matrix products, with keys and values packed first.
#pragma once

#include "pagecore/ops/cpu/kernels/products/multiply_pairs.hpp"
#include "pagecore/ops/cpu/kernels/tiles/panels.hpp"
#include "pagecore/ops/cpu/kernels/tiles/tile.hpp"
#include "pagecore/ops/cpu/kernels/tiles/visibility.hpp"
#if defined(PC_AMX)
#include "pagecore/ops/cpu/kernels/products/decode_amx.hpp"
#endif

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX)
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;
#endif

template <Float K>
void score_packed(const HeadRows& rows, const TokenRows& keys, const TileUse& use, const NextRows& next_rows,
                  int64_t dim, const Scratch& scratch) {
  pack_keys<K>(keys, use, dim, scratch.key, next_rows);
  multiply_floats(rows.query, rows.query_stride, scratch.key, kTileTokens, rows.scores, kTileTokens, nullptr,
                  rows.count, padded(dim), kTileTokens);
}

// Scores of keys in a panel of pairs.
inline void multiply_key_pairs(AmxTiles& tiles, const HeadRows& rows, int64_t dim, const Scratch& scratch) {
  const auto* panel = reinterpret_cast<const uint32_t*>(scratch.key);
  multiply_pairs(tiles, rows.query_pairs, rows.query_stride, panel, kTileTokens, rows.scores, kTileTokens, nullptr,
                 rows.count, pair_padded(dim), kTileTokens);
}

// Adds weights times values in a panel of pairs; all rows attend to the same keys.
inline void multiply_value_pairs(AmxTiles& tiles, const HeadRows& rows, int64_t dim, const Scratch& scratch) {
  const auto* panel = reinterpret_cast<const uint32_t*>(scratch.value);
  multiply_pairs(tiles, rows.weights, kTileTokens, panel, padded(dim), rows.acc, rows.acc_stride, rows.factor,
                 rows.count, kTileTokens, padded(dim));
}

inline void score_packed_pairs(AmxTiles& tiles, const HeadRows& rows, const TokenRows& keys, const TileUse& use,
                               const NextRows& next_rows, int64_t dim, const Scratch& scratch) {
  auto* panel = reinterpret_cast<uint32_t*>(scratch.key);
  pack_key_pairs(keys, use, dim, panel, next_rows);
  multiply_key_pairs(tiles, rows, dim, scratch);
}

// Scores of few rows on AMX; keys are read in place.
inline void score_in_place_amx([[maybe_unused]] AmxTiles& tiles, [[maybe_unused]] const HeadRows& rows,
                               [[maybe_unused]] const uint32_t* query_panel, [[maybe_unused]] const TokenRows& keys,
                               [[maybe_unused]] const TileUse& use, [[maybe_unused]] const NextRows& next_rows,
                               [[maybe_unused]] int64_t dim, [[maybe_unused]] const Scratch& scratch) {
#if defined(PC_AMX)
  score_amx(tiles, keys, use, next_rows, dim, query_panel, rows.count, rows.scores,
            reinterpret_cast<uint16_t*>(scratch.key));
#endif
}

// The tokens of the tile that one row attends to.
PC_FORCE_INLINE TileUse use_of_row(const HeadRows& rows, int64_t row, const TileUse& all, const Scratch& scratch,
                                   int64_t group) {
  const int64_t query = (rows.first + row) / group;
  return {rows.low[row], rows.high[row], all.used == nullptr ? nullptr : scratch.keep + query * kTileTokens};
}

// A tile with infinities or NaN to which rows attend differently is packed again for each row, because 0 * NaN must not
// reach a row that does not attend to the NaN.
template <Float V>
void accumulate_packed(const HeadRows& rows, const TokenRows& values, const Visibility& visible,
                       const NextRows& next_rows, int64_t dim, int64_t group, const Scratch& scratch) {
  const int64_t columns = padded(dim);
  const auto multiply = [&](int64_t row, int64_t count) {
    multiply_floats(rows.scores + row * kTileTokens, kTileTokens, scratch.value, columns,
                    rows.acc + row * rows.acc_stride, rows.acc_stride, rows.factor + row, count, kTileTokens, columns);
  };
  if (pack_values<V>(values, visible.use(), dim, scratch.value, next_rows) || visible.uniform()) {
    return multiply(0, rows.count);
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    pack_values<V>(values, use_of_row(rows, row, visible.use(), scratch, group), dim, scratch.value);
    multiply(row, 1);
  }
}

inline void accumulate_packed_pairs(AmxTiles& tiles, const HeadRows& rows, const TokenRows& values,
                                    const Visibility& visible, const NextRows& next_rows, int64_t dim, int64_t group,
                                    [[maybe_unused]] bool by_amx, const Scratch& scratch) {
  const int64_t columns = padded(dim);
  auto* panel = reinterpret_cast<uint32_t*>(scratch.value);
  const auto multiply = [&](int64_t row, int64_t count) {
    multiply_pairs(tiles, rows.weights + row * kTileTokens, kTileTokens, panel, columns,
                   rows.acc + row * rows.acc_stride, rows.acc_stride, rows.factor + row, count, kTileTokens, columns);
  };
  if (pack_value_pairs(values, visible.use(), dim, panel, next_rows) || visible.uniform()) {
#if defined(PC_AMX)
    if (by_amx) {
      return accumulate_amx(tiles, rows.weights, panel, columns, rows.acc, rows.acc_stride, rows.factor, rows.count);
    }
#endif
    return multiply(0, rows.count);
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    pack_value_pairs(values, use_of_row(rows, row, visible.use(), scratch, group), dim, panel);
    multiply(row, 1);
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
