// Online softmax of transposed scores: a vector holds one token and kLanes query rows.
#pragma once

#include "pagecore/ops/cpu/kernels/convert.hpp"
#include "pagecore/ops/cpu/kernels/latent_tile.hpp"
#include "pagecore/ops/cpu/kernels/math.hpp"
#include "pagecore/ops/cpu/kernels/transpose.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Replaces the scores [64, columns] of kLanes rows by weights, 0 for tokens that a row does not attend to, and updates
// the rows' maximum, sum and factor.
PC_FORCE_INLINE void softmax_column(const LatentScratch& scratch, int64_t columns, int64_t column, int count,
                                    bool whole, float scale) {
  float* scores = scratch.scores + column;
  IntVec low, high;
  __builtin_memcpy(&low, scratch.low + column, sizeof low);
  __builtin_memcpy(&high, scratch.high + column, sizeof high);
  Vec top = splat(-kInfinity);
  for (int t = 0; t < count; ++t) {
    Vec x = load(scores + t * columns) * scale;
    if (!whole) {
      const IntVec attended = (low <= t) & (high > t);
      x = attended ? x : splat(-kInfinity);
    }
    store(scores + t * columns, x);
    top = max(top, x);
  }
  const Vec old_max = load(scratch.max + column);
  const Vec new_max = max(old_max, top);
  const Vec origin = new_max == -kInfinity ? Vec{} : new_max;
  Vec added = {};
  for (int t = 0; t < count; ++t) {
    const Vec weight = exp(load(scores + t * columns) - origin);
    store(scores + t * columns, weight);
    added += weight;
  }
  for (int t = count; t < kTileTokens; ++t) store(scores + t * columns, Vec{});
  const Vec factor = old_max == new_max ? splat(1.0f) : exp(old_max - origin);
  store(scratch.max + column, new_max);
  store(scratch.factor + column, factor);
  store(scratch.sum + column, fma(load(scratch.sum + column), factor, added));
}

// Transposes the weights of kLanes rows to weights [columns, 64].
PC_FORCE_INLINE void transpose_weights(const LatentScratch& scratch, int64_t columns, int64_t column) {
  for (int t = 0; t < kTileTokens; t += kLanes) {
    Vec square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = load(scratch.scores + (t + i) * columns + column);
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(scratch.weights + (column + i) * kTileTokens + t, square[i]);
  }
}

PC_FORCE_INLINE BitVec rounded_bf16(Vec v) {
  const BitVec bits = (BitVec)v, quiet = bits | 0x00400000;
  return v == v ? bits + 0x7fff + ((bits >> 16) & 1) : quiet;
}

// The same, rounded to bfloat16: pairs of tokens are transposed together.
PC_FORCE_INLINE void transpose_weight_pairs(const LatentScratch& scratch, int64_t columns, int64_t column) {
  for (int pair = 0; pair < kTileTokens / 2; pair += kLanes) {
    Vec square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const float* first = scratch.scores + 2 * (pair + i) * columns + column;
      const BitVec even = rounded_bf16(load(first)), odd = rounded_bf16(load(first + columns));
      square[i] = (Vec)(even >> 16 | (odd & 0xffff0000));
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(scratch.weights + (column + i) * kTileTokens / 2 + pair, square[i]);
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
