// Values of one tile: weights times values that are read in place, added to the rows' sums.
//
// The sum of a tile starts at zero and is added to the row's sum as a whole, so that errors grow with the number of
// tiles instead of the number of tokens.
#pragma once

#include "pagecore/ops/cpu/kernels/products/scores.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

struct RowSums {
  const float* weights;  // [rows, 64]
  float* acc;            // [rows, stride]
  int64_t stride;
  const float* factor;  // [rows]; rescales the old acc
};

// Adds the sums of the tile to vectors first_vector .. first_vector + N of acc.
template <int R, int N>
PC_FORCE_INLINE void add_sums(const RowSums& rows, const Vec (&sums)[R][N], int64_t first_vector) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* acc = rows.acc + r * rows.stride + first_vector * kLanes;
    const Vec factor = splat(rows.factor[r]);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(acc + n * kLanes, fma(load(acc + n * kLanes), factor, sums[r][n]));
  }
}

// Accumulates vectors first_vector .. first_vector + N over tokens first .. last.
template <Float V, int R, int N>
PC_FORCE_INLINE void value_block(const RowSums& rows, const TokenRows& values, const NextRows& next_rows, int first,
                                 int last, int64_t first_vector) {
  const int64_t byte = first_vector * kLanes * kSize<V>;
  Vec sums[R][N] = {};
  for (int token = first; token < last; ++token) {
    if (first_vector == 0) prefetch_elsewhere(next_rows, token, 1);
    const char* p = values.base + values.offsets[token] + byte;
    Vec v[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      v[n] = load_as_float<V>(p + n * kLanes * kSize<V>);
      if (n * kLanes * kSize<V> % kLine == 0 && next_rows.distance != 0) {
        prefetch_line(p + n * kLanes * kSize<V> + next_rows.distance);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec w = splat(rows.weights[r * kTileTokens + token]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[r][n] = fma(w, v[n], sums[r][n]);
    }
  }
  add_sums<R, N>(rows, sums, first_vector);
}

// With few rows, a block covers twice the width, so that memory is read in longer stretches.
template <int R>
constexpr int kWidest = kBlockVectors * (R * 2 <= kBlockRows && kBlockRows == 4 ? 2 : 1);

// Calls visit.template operator()<N>(vector) for `vectors` vectors, with N = kWidth, then half of it, down to
// kNarrowest.
template <int kWidth, int kNarrowest, typename Visit>
PC_FORCE_INLINE void for_each_width(int64_t vectors, Visit&& visit, int64_t vector = 0) {
  for (; vector + kWidth <= vectors; vector += kWidth) visit.template operator()<kWidth>(vector);
  if constexpr (kWidth > kNarrowest) for_each_width<kWidth / 2, kNarrowest>(vectors, visit, vector);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
