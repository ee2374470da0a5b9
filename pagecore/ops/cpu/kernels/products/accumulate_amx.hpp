// Weights times the values of a tile, added to sums with AMX.
//
//                                 right: tmm6, 7                    (16 pairs of tokens, 16 columns)
//   left: tmm2  tmm3              tmm0   the first 16 rows          (16 rows, 32 tokens each)
//         tmm4  tmm5              tmm1   the other 16
//
// Sums are rescaled in memory, except for rows whose factor is 1, and the tiles continue them: a row has the same bits
// in every tile. If the row count is not a multiple of 16, the last tile starts early, and continues a copy of its own
// rows.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"
#include "pagecore/ops/cpu/kernels/products/multiply_amx.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr int kWeightTile = 2;
constexpr int kSteps = static_cast<int>(kTileTokens / kAmxDepth);
static_assert(kSteps == 2);

// Multiplies the sums of rows first .. last by their factors.
PC_FORCE_INLINE void rescale_rows(const AmxProduct& p, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float factor = p.factor[row];
    if (factor == 1.0f) continue;
    float* const sums = p.c + row * p.ldc;
    for (int64_t d = 0; d < p.columns; d += kLanes) store(sums + d, load(sums + d) * factor);
  }
}

// Adds to the sums of R tiles of rows, which are the left sides in the tiles, 16 columns from `column` on.
template <int R>
PC_FORCE_INLINE void continue_sums(const AmxProduct& p, int64_t column, float* const (&sums)[R], int64_t stride) {
  for_each_constant<R>([&]<int r>() __attribute__((always_inline)) { Amx::load<r>(sums[r], 4 * stride); });
  for_each_constant<kSteps>([&]<int k>() __attribute__((always_inline)) {
    Amx::load<kRightTile + k>(p.b + k * kAmxDepth / 2 * p.ldb + column, 4 * p.ldb);
    for_each_constant<R>([]<int r>() __attribute__((always_inline)) {
      Amx::multiply<r, kWeightTile + r * kSteps + k, kRightTile + k>();
    });
  });
  for_each_constant<R>([&]<int r>() __attribute__((always_inline)) { Amx::store<r>(sums[r], 4 * stride); });
}

template <int R>
PC_FORCE_INLINE void load_weights(const AmxProduct& p, int64_t begin) {
  for_each_constant<R * kSteps>([&]<int T>() __attribute__((always_inline)) {
    const uint16_t* const from = p.a + (begin + T / kSteps * kAmxRows) * p.lda + T % kSteps * kAmxDepth;
    Amx::load<kWeightTile + T>(from, 2 * p.lda);
  });
}

// Tiles whose rows all get their sums, from row `begin` on.
template <int R>
PC_FORCE_INLINE void accumulate_whole(const AmxProduct& p, int64_t begin) {
  load_weights<R>(p, begin);
  for (int64_t column = 0; column < p.columns; column += kAmxColumns) {
    float* sums[R];
    for (int r = 0; r < R; ++r) sums[r] = p.c + (begin + r * kAmxRows) * p.ldc + column;
    continue_sums<R>(p, column, sums, p.ldc);
  }
}

// A tile of p.height rows from `rows.begin` on.
inline void accumulate_part(const AmxProduct& p, const RowTile& rows) {
  alignas(64) float copy[kAmxRows][kAmxColumns] = {};
  load_weights<1>(p, rows.begin);
  for (int64_t column = 0; column < p.columns; column += kAmxColumns) {
    float* const own = p.c + column;
    for (int64_t row = rows.first; row < rows.last; ++row) store(copy[row - rows.begin], load(own + row * p.ldc));
    continue_sums<1>(p, column, {copy[0]}, kAmxColumns);
    for (int64_t row = rows.first; row < rows.last; ++row) store(own + row * p.ldc, load(copy[row - rows.begin]));
  }
}

// c [rows, columns] = factor * c + a [rows, 64] . b. The depth is kTileTokens.
inline void accumulate_rows_amx(AmxTiles& tiles, const AmxProduct& p, int64_t rows) {
  if (rows == 0) return;
  tiles.set_rows(static_cast<int>(p.height));
  rescale_rows(p, 0, rows);
  int64_t row = 0;
  for (; row + 2 * kAmxRows <= rows; row += 2 * kAmxRows) accumulate_whole<2>(p, row);
  if (row + kAmxRows <= rows) accumulate_whole<1>(p, row), row += kAmxRows;
  if (row < rows) accumulate_part(p, {rows - p.height, row, rows});
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
