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

// For a tile that holds infinities or NaN and that not every row attends to as a whole: 0 * NaN must not reach a row
// that does not attend to it, so each row visits its own tokens only. `keep` of the rows' queries, or null.
inline void weigh_by_token(const HeadRows& rows, const float* panel, const uint8_t* keep, int64_t group,
                           int64_t columns) {
  for (int64_t row = 0; row < rows.count; ++row) {
    float* acc = rows.acc + row * rows.acc_stride;
    const float* weights = rows.scores + row * kTileTokens;
    for (int64_t d = 0; d < columns; d += kLanes) {
      Vec sum = {};
      for (int token = rows.low[row]; token < rows.high[row]; ++token) {
        if (keep != nullptr && keep[row / group * kTileTokens + token] == 0) continue;
        sum = fma(splat(weights[token]), load(panel + token * columns + d), sum);
      }
      store(acc + d, fma(load(acc + d), splat(rows.factor[row]), sum));
    }
  }
}

template <Float V>
void weigh_packed(const HeadRows& rows, const Tokens& values, const Sight& sight, const Ahead& ahead, int64_t dim,
                  int64_t group, const Scratch& scratch) {
  const int64_t columns = padded(dim);
  if (pack_values<V>(values, sight.use(), dim, scratch.value, ahead) || sight.uniform()) {
    multiply_floats(rows.scores, kTileTokens, scratch.value, columns, rows.acc, rows.acc_stride, rows.factor,
                    rows.count, kTileTokens, columns);
    return;
  }
  // Rows begin with a query's first.
  const int64_t first_query = (rows.low - scratch.low) / group;
  const uint8_t* keep = sight.use().used == nullptr ? nullptr : scratch.keep + first_query * kTileTokens;
  weigh_by_token(rows, scratch.value, keep, group, columns);
}

// Returns false, and has done nothing, where rows must visit their own tokens only.
inline bool weigh_packed_pairs(Tiles& tiles, const HeadRows& rows, const Tokens& values, const Sight& sight,
                               const Ahead& ahead, int64_t dim, [[maybe_unused]] bool by_tiles,
                               const Scratch& scratch) {
  const int64_t columns = padded(dim);
  auto* panel = reinterpret_cast<uint32_t*>(scratch.value);
  if (!pack_value_pairs(values, sight.use(), dim, panel, ahead) && !sight.uniform()) return false;
#if defined(PC_AMX)
  if (by_tiles) {
    value_tile_amx(tiles, rows.weights, panel, columns, rows.acc, rows.acc_stride, rows.factor, rows.count);
    return true;
  }
#endif
  multiply_pairs(tiles, rows.weights, kTileTokens, panel, columns, rows.acc, rows.acc_stride, rows.factor, rows.count,
                 kTileTokens, columns);
  return true;
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
