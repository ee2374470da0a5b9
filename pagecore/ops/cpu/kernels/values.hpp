// Values: the weights of one tile times its values, added to what the rows have so far.
//
// A tile's sum starts from zero and is added to the row's sum as a whole: errors grow with the number of tiles, not of
// tokens.
#pragma once

#include "pagecore/ops/cpu/kernels/scores.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

struct RowSums {
  const float* weights;  // [rows, 64]
  float* acc;            // [rows, stride]
  int64_t stride;
  const float* factor;  // [rows], for what acc held before
};

// Vectors first_vector .. first_vector + N of the rows' sums.
template <Float V, int R, int N>
PC_FORCE_INLINE void value_block(const RowSums& rows, const Tokens& values, const Ahead& ahead, int first, int last,
                                 int64_t first_vector) {
  const int64_t byte = first_vector * kLanes * kSize<V>;
  Vec sums[R][N] = {};
  for (int token = first; token < last; ++token) {
    if (ahead.row_bytes != 0) {
      prefetch(ahead.tokens.base + ahead.tokens.offsets[token] + byte, N * kLanes * kSize<V>);
    }
    const char* p = values.base + values.offsets[token] + byte;
    Vec v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) v[n] = load_as_float<V>(p + n * kLanes * kSize<V>);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec w = splat(rows.weights[r * kTileTokens + token]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = fma(w, v[n], sums[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* acc = rows.acc + r * rows.stride + first_vector * kLanes;
    const Vec factor = splat(rows.factor[r]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(acc + n * kLanes, fma(load(acc + n * kLanes), factor, sums[r][n]));
  }
}

template <Float V, int R>
void value_rows(const RowSums& rows, const Tokens& values, const Ahead& ahead, int first, int last, int64_t vectors) {
  int64_t vector = 0;
  for (; vector + kBlockVectors <= vectors; vector += kBlockVectors) {
    value_block<V, R, kBlockVectors>(rows, values, ahead, first, last, vector);
  }
  if (vectors - vector >= 2) {
    value_block<V, R, 2>(rows, values, ahead, first, last, vector);
    vector += 2;
  }
  if (vector < vectors) value_block<V, R, 1>(rows, values, ahead, first, last, vector);
}

template <Float V>
void value_tile(const RowSums& all, int64_t count, const Tokens& values, Ahead ahead, int64_t vectors,
                const Scratch& scratch) {
  for_each_row_block(count, [&]<int R>(int64_t row) {
    const Span span = span_of(scratch.low + row, scratch.high + row, R);
    if (span.first < span.last) {
      const RowSums rows{all.weights + row * kTileTokens, all.acc + row * all.stride, all.stride, all.factor + row};
      value_rows<V, R>(rows, values, ahead, span.first, span.last, vectors);
      ahead.row_bytes = 0;
    }
  });
}

// The same for a tile that holds infinities or NaN and that not every row attends to as a whole: 0 * NaN must not reach
// a row that does not attend to it, so each row visits its own tokens only, in the same order.
inline void value_tile_by_token(const RowSums& all, int64_t count, int64_t queries, const Tokens& values,
                                int64_t vectors, bool masked, const Scratch& scratch) {
  const int64_t group = count / queries;
  for (int64_t row = 0; row < count; ++row) {
    const uint8_t* keep = scratch.keep + row / group * kTileTokens;
    int64_t offsets[kTileTokens];
    alignas(64) float weights[kTileTokens];
    int used = 0;
    for (int token = scratch.low[row]; token < scratch.high[row]; ++token) {
      if (masked && keep[token] == 0) continue;
      offsets[used] = values.offsets[token];
      weights[used++] = all.weights[row * kTileTokens + token];
    }
    if (scratch.low[row] >= scratch.high[row]) continue;
    const RowSums rows{weights, all.acc + row * all.stride, all.stride, all.factor + row};
    value_rows<Float::F32, 1>(rows, {values.base, offsets}, {{nullptr, nullptr}, 0}, 0, used, vectors);
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
