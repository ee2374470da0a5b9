// Products of bfloat16 pairs by AMX's tiles.
//
//               right: tmm6, 7  (16 pairs deep, 16 columns each)
//   left: tmm4  tmm0  tmm1          R tile rows x N tile columns of sums, R * N <= 4
//         tmm5  tmm2  tmm3
//
// Every sum starts from zero, and meets what was there as a whole, outside of the tiles. Where the rows are no multiple
// of 16, the last tile begins early: it works once more on rows that were done, to the same bits, and keeps its own.
#pragma once

#include <utility>

#include "pagecore/ops/cpu/kernels/multiply.hpp"
#include "pagecore/ops/cpu/kernels/tiles.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr int kLeftTile = 4, kRightTile = 6;
constexpr int64_t kTileColumns = kTileBytes / 4;
constexpr int64_t kTileDepth = kTileBytes / 2;

struct TileProduct {
  const uint16_t* a;
  int64_t lda;
  const uint32_t* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  const float* factor;
  int64_t depth;
  int64_t columns;
  int64_t height;  // of a tile of rows
};

// A tile holds the rows from `begin` on; of them, first .. last are wanted.
struct TileRows {
  int64_t begin, first, last;
};

// f.template operator()<0>() ... <kCount - 1>(): tiles are named in the instructions.
template <int kCount, typename F>
PC_FORCE_INLINE void for_each_constant(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>)
      __attribute__((always_inline)) { (f.template operator()<I>(), ...); }(std::make_integer_sequence<int, kCount>{});
}

template <int R, int N>
void multiply_tile_block(const TileProduct& p, const TileRows* rows, int64_t column) {
  static_assert(R <= 2 && R * N <= 4);
  for_each_constant<R * N>([]<int T>() __attribute__((always_inline)) { Amx::zero<T>(); });
  for (int64_t k = 0; k < p.depth; k += kTileDepth) {
    for_each_constant<R>([&]<int r>() __attribute__((always_inline)) {
      Amx::load<kLeftTile + r>(p.a + rows[r].begin * p.lda + k, 2 * p.lda);
    });
    for_each_constant<N>([&]<int n>() __attribute__((always_inline)) {
      constexpr int kRight = kRightTile + n % 2;
      Amx::load<kRight>(p.b + k / 2 * p.ldb + column + n * kTileColumns, 4 * p.ldb);
      for_each_constant<R>([]<int r>()
                               __attribute__((always_inline)) { Amx::multiply<r * N + n, kLeftTile + r, kRight>(); });
    });
  }
  bool whole = p.factor == nullptr;
  for (int r = 0; r < R; ++r) whole = whole && rows[r].last == rows[r].begin + p.height;
  if (whole) {
    for_each_constant<R * N>([&]<int T>() __attribute__((always_inline)) {
      Amx::store<T>(p.c + rows[T / N].begin * p.ldc + column + T % N * kTileColumns, 4 * p.ldc);
    });
    return;
  }
  alignas(64) float sums[R][kTileRows][N * kTileColumns];
  for_each_constant<R * N>([&]<int T>() __attribute__((always_inline)) {
    Amx::store<T>(&sums[T / N][0][T % N * kTileColumns], sizeof(sums[0][0]));
  });
  for (int r = 0; r < R; ++r) {
    for (int64_t row = rows[r].first; row < rows[r].last; ++row) {
      const float* sum = sums[r][row - rows[r].begin];
      float* out = p.c + row * p.ldc + column;
      const float* factor = p.factor == nullptr ? nullptr : p.factor + row;
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) add_product(out + n * kTileColumns, load(sum + n * kTileColumns), factor);
    }
  }
}

template <int R>
void multiply_tile_rows(const TileProduct& p, const TileRows* rows) {
  constexpr int kWide = 4 / R;
  int64_t column = 0;
  for (; column + kWide * kTileColumns <= p.columns; column += kWide * kTileColumns) {
    multiply_tile_block<R, kWide>(p, rows, column);
  }
  switch ((p.columns - column) / kTileColumns) {
    case 1: return multiply_tile_block<R, 1>(p, rows, column);
    case 2:
      if constexpr (kWide > 2) multiply_tile_block<R, 2>(p, rows, column);
      return;
    case 3:
      if constexpr (kWide > 2) multiply_tile_block<R, 3>(p, rows, column);
      return;
    default: return;
  }
}

inline void multiply_tiles(Tiles& tiles, const TileProduct& p, int64_t rows) {
  if (rows == 0) return;
  tiles.set_rows(static_cast<int>(p.height));
  for (int64_t row = 0; row < rows; row += 2 * kTileRows) {
    TileRows both[2];
    for (int r = 0; r < 2; ++r) {
      const int64_t first = row + r * kTileRows;
      const int64_t begin = first < rows - p.height ? first : rows - p.height;
      both[r] = {begin, first, begin + p.height};
    }
    if (both[1].first < rows) {
      multiply_tile_rows<2>(p, both);
    } else {
      multiply_tile_rows<1>(p, both);
    }
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
