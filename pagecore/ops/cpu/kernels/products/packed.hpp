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

// Scores of keys in a panel.
inline void multiply_keys(const HeadRows& rows, int64_t dim, const Scratch& scratch) {
  multiply_floats(rows.query, rows.query_stride, scratch.key, kTileTokens, rows.scores, kTileTokens, nullptr,
                  rows.count, padded(dim), kTileTokens);
}

// Scores of keys in a panel of pairs.
inline void multiply_key_pairs(AmxTiles& tiles, const HeadRows& rows, int64_t dim, const Scratch& scratch) {
  const auto* panel = reinterpret_cast<const uint32_t*>(scratch.key);
  multiply_pairs(tiles, rows.query_pairs, rows.query_stride, panel, kTileTokens, rows.scores, kTileTokens, nullptr,
                 rows.count, pair_padded(dim), kTileTokens);
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

// Adds weights times values in a panel; all rows attend to the same keys, or all values are finite.
inline void multiply_values(const HeadRows& rows, int64_t dim, const Scratch& scratch) {
  multiply_floats(rows.scores, kTileTokens, scratch.value, padded(dim), rows.acc, rows.acc_stride, rows.factor,
                  rows.count, kTileTokens, padded(dim));
}

// The same in a panel of pairs.
inline void multiply_value_pairs(AmxTiles& tiles, const HeadRows& rows, int64_t dim, const Scratch& scratch) {
  const auto* panel = reinterpret_cast<const uint32_t*>(scratch.value);
  multiply_pairs(tiles, rows.weights, kTileTokens, panel, padded(dim), rows.acc, rows.acc_stride, rows.factor,
                 rows.count, kTileTokens, padded(dim));
}

// The same with few rows on AMX.
inline void multiply_value_pairs_amx([[maybe_unused]] AmxTiles& tiles, [[maybe_unused]] const HeadRows& rows,
                                     [[maybe_unused]] int64_t dim, [[maybe_unused]] const Scratch& scratch) {
#if defined(PC_AMX)
  const auto* panel = reinterpret_cast<const uint32_t*>(scratch.value);
  accumulate_amx(tiles, rows.weights, panel, padded(dim), rows.acc, rows.acc_stride, rows.factor, rows.count);
#endif
}

// The tokens of the tile that one row attends to.
PC_FORCE_INLINE TileUse use_of_row(const HeadRows& rows, int64_t row, const TileUse& all, const Scratch& scratch,
                                   int64_t group) {
  const int64_t query = (rows.first + row) / group;
  return {rows.low[row], rows.high[row], all.used == nullptr ? nullptr : scratch.keep + query * kTileTokens};
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
