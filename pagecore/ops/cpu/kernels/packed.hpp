// One tile and one head, keys and values packed first: matrix products.
#pragma once

#include "pagecore/ops/cpu/kernels/multiply_pairs.hpp"
#include "pagecore/ops/cpu/kernels/panels.hpp"
#include "pagecore/ops/cpu/kernels/rows_of_head.hpp"
#include "pagecore/ops/cpu/kernels/sight.hpp"
#if defined(PC_AMX)
#include "pagecore/ops/cpu/kernels/decode_tiles.hpp"
#endif

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

template <Float K>
void score_packed(const HeadRows& rows, const Tokens& keys, const TileUse& use, const Ahead& ahead, int64_t dim,
                  const Scratch& scratch) {
  pack_keys<K>(keys, use, dim, scratch.key, ahead);
  multiply_floats(rows.query, rows.query_stride, scratch.key, kTileTokens, rows.scores, kTileTokens, nullptr,
                  rows.count, padded(dim), kTileTokens);
}

inline void score_packed_pairs(Tiles& tiles, const HeadRows& rows, const Tokens& keys, const TileUse& use,
                               const Ahead& ahead, int64_t dim, const Scratch& scratch) {
  auto* panel = reinterpret_cast<uint32_t*>(scratch.key);
  pack_key_pairs(keys, use, dim, panel, ahead);
  multiply_pairs(tiles, rows.query_pairs, rows.query_stride, panel, kTileTokens, rows.scores, kTileTokens, nullptr,
                 rows.count, pair_padded(dim), kTileTokens);
}

// Few rows on AMX: keys are read as tiles where they lie.
inline void score_tiles([[maybe_unused]] Tiles& tiles, [[maybe_unused]] const HeadRows& rows,
                        [[maybe_unused]] const uint32_t* query_panel, [[maybe_unused]] const Tokens& keys,
                        [[maybe_unused]] const TileUse& use, [[maybe_unused]] const Ahead& ahead,
                        [[maybe_unused]] int64_t dim, [[maybe_unused]] const Scratch& scratch) {
#if defined(PC_AMX)
  score_tile_amx(tiles, keys, use, ahead, dim, query_panel, rows.count, rows.scores,
                 reinterpret_cast<uint16_t*>(scratch.key));
#endif
}

// What of the tile one row alone attends to.
PC_FORCE_INLINE TileUse use_of_row(const HeadRows& rows, int64_t row, const TileUse& all, const Scratch& scratch,
                                   int64_t group) {
  const int64_t query = (rows.first + row) / group;
  return {rows.low[row], rows.high[row], all.used == nullptr ? nullptr : scratch.keep + query * kTileTokens};
}

// A tile that holds infinities or NaN, and that not every row attends to as a whole, is packed anew for each row: 0 *
// NaN must not reach a row that does not attend to it.
template <Float V>
void weigh_packed(const HeadRows& rows, const Tokens& values, const Sight& sight, const Ahead& ahead, int64_t dim,
                  int64_t group, const Scratch& scratch) {
  const int64_t columns = padded(dim);
  const auto multiply = [&](int64_t row, int64_t count) {
    multiply_floats(rows.scores + row * kTileTokens, kTileTokens, scratch.value, columns,
                    rows.acc + row * rows.acc_stride, rows.acc_stride, rows.factor + row, count, kTileTokens, columns);
  };
  if (pack_values<V>(values, sight.use(), dim, scratch.value, ahead) || sight.uniform()) {
    return multiply(0, rows.count);
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    pack_values<V>(values, use_of_row(rows, row, sight.use(), scratch, group), dim, scratch.value);
    multiply(row, 1);
  }
}

inline void weigh_packed_pairs(Tiles& tiles, const HeadRows& rows, const Tokens& values, const Sight& sight,
                               const Ahead& ahead, int64_t dim, int64_t group, [[maybe_unused]] bool by_tiles,
                               const Scratch& scratch) {
  const int64_t columns = padded(dim);
  auto* panel = reinterpret_cast<uint32_t*>(scratch.value);
  const auto multiply = [&](int64_t row, int64_t count) {
    multiply_pairs(tiles, rows.weights + row * kTileTokens, kTileTokens, panel, columns,
                   rows.acc + row * rows.acc_stride, rows.acc_stride, rows.factor + row, count, kTileTokens, columns);
  };
  if (pack_value_pairs(values, sight.use(), dim, panel, ahead) || sight.uniform()) {
#if defined(PC_AMX)
    if (by_tiles) {
      return value_tile_amx(tiles, rows.weights, panel, columns, rows.acc, rows.acc_stride, rows.factor, rows.count);
    }
#endif
    return multiply(0, rows.count);
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    pack_value_pairs(values, use_of_row(rows, row, sight.use(), scratch, group), dim, panel);
    multiply(row, 1);
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
