// Online softmax of transposed scores: a vector holds one token and kLanes query rows.
#pragma once

#include "pagecore/ops/cpu/kernels/latent/latent_tile.hpp"
#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/cpu/kernels/simd/math.hpp"
#include "pagecore/ops/cpu/kernels/simd/transpose.hpp"
#include "pagecore/ops/cpu/kernels/tiles/panels.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The origin of the weights of kLanes query rows, and the factor of their older sums.
struct SoftmaxColumn {
  Vec origin;
  Vec factor;
};

// Scores of kLanes query rows for tokens [first, last) of a tile.
struct TileScores {
  int first;
  int last;
  bool whole;    // the rows attend to all of the tokens
  bool has_top;  // scratch.top has the greatest scores, and the scores are scaled
  float scale;
};

// Scales the scores [64, columns] of kLanes query rows, sets those of tokens that a row does not attend to to -inf, and
// returns the greatest of each row.
PC_FORCE_INLINE Vec scale_scores(const LatentScratch& scratch, int64_t columns, int64_t column, const TileScores& s) {
  float* scores = scratch.scores + column;
  if (s.has_top) return load(scratch.top + column);
  IntVec low, high;
  __builtin_memcpy(&low, scratch.low + column, sizeof low);
  __builtin_memcpy(&high, scratch.high + column, sizeof high);
  for (int t = 0; t < s.first; ++t) store(scores + t * columns, splat(-kInfinity));
  for (int t = s.last; t < kTileTokens; ++t) store(scores + t * columns, splat(-kInfinity));
  Vec top = splat(-kInfinity);
  for (int t = s.first; t < s.last; ++t) {
    Vec x = load(scores + t * columns) * s.scale;
    if (!s.whole) {
      const IntVec attended = (low <= t) & (high > t);
      x = attended ? x : splat(-kInfinity);
    }
    store(scores + t * columns, x);
    top = max(top, x);
  }
  return top;
}

// Scales the scores, and updates the rows' maxima and factors.
PC_FORCE_INLINE SoftmaxColumn begin_softmax(const LatentScratch& scratch, int64_t columns, int64_t column,
                                            const TileScores& scores) {
  const Vec top = scale_scores(scratch, columns, column, scores);
  const Vec old_max = load(scratch.max + column);
  const Vec new_max = max(old_max, top);
  const Vec origin = new_max == -kInfinity ? Vec{} : new_max;
  const Vec factor = old_max == new_max ? splat(1.0f) : exp(old_max - origin);
  store(scratch.max + column, new_max);
  store(scratch.factor + column, factor);
  return {origin, factor};
}

PC_FORCE_INLINE void add_weights(const LatentScratch& scratch, int64_t column, const SoftmaxColumn& rows, Vec added) {
  store(scratch.sum + column, fma(load(scratch.sum + column), rows.factor, added));
}

// Turns the scores of kLanes query rows into weights [columns, 64].
PC_FORCE_INLINE void softmax_column(const LatentScratch& scratch, int64_t columns, int64_t column,
                                    const TileScores& scores) {
  const SoftmaxColumn rows = begin_softmax(scratch, columns, column, scores);
  Vec added = {};
  for (int t = 0; t < kTileTokens; t += kLanes) {
    Vec square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      square[i] = exp(load(scratch.scores + (t + i) * columns + column) - rows.origin);
      added += square[i];
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(scratch.weights + (column + i) * kTileTokens + t, square[i]);
  }
  add_weights(scratch, column, rows, added);
}

// {a0, a16, a1, a17 ...}
template <int... I>
PC_FORCE_INLINE Halves zip_halves(Halves a, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, a, (I / 2 + (I & 1) * kLanes)...);
}

// Lane i has even[i] and odd[i] as bfloat16; for instruction sets with pairs only. Weights are 0, at least e^-86, or
// NaN, so the instruction, which flushes denormals, is exact enough.
PC_FORCE_INLINE Vec zip_bf16([[maybe_unused]] Vec even, [[maybe_unused]] Vec odd) {
#if defined(__AVX512BF16__)
  return (Vec)zip_halves((Halves)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even), TwiceLanes{});
#else
  __builtin_trap();
#endif
}

// The same, rounded to bfloat16: pairs of tokens are transposed together.
PC_FORCE_INLINE void softmax_column_pairs(const LatentScratch& scratch, int64_t columns, int64_t column,
                                          const TileScores& scores) {
  const SoftmaxColumn rows = begin_softmax(scratch, columns, column, scores);
  Vec added = {}, added_odd = {};
  for (int pair = 0; pair < kTileTokens / 2; pair += kLanes) {
    Vec square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const float* even_scores = scratch.scores + 2 * (pair + i) * columns + column;
      const Vec even = exp(load(even_scores) - rows.origin), odd = exp(load(even_scores + columns) - rows.origin);
      added += even;
      added_odd += odd;
      square[i] = zip_bf16(even, odd);
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(scratch.weights + (column + i) * kTileTokens / 2 + pair, square[i]);
  }
  add_weights(scratch, column, rows, added + added_odd);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
