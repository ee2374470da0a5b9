// Scores become weights, a row at a time; rows keep a running maximum and sum, and fold at fixed places.
#pragma once

#include "pagecore/ops/cpu/kernels/ahead.hpp"
#include "pagecore/ops/cpu/kernels/convert.hpp"
#include "pagecore/ops/cpu/kernels/math.hpp"
#include "pagecore/ops/cpu/kernels/tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// What changes the scores of one row within a tile.
struct RowScores {
  int32_t low, high;    // keys of the tile that it attends to
  Order order;          // in which the scores stand
  const uint8_t* keep;  // of the keys between, these, in natural order; null: all
  float scale;          // what scores are multiplied by first
  float softcap;        // 0: none. Scores come divided by it.
  float slope;          // 0: none
  int32_t bias_begin;   // tile start - the key whose bias is 0
};

// The tokens at the places of a vector; `step` further in each lane, those of the next vector.
struct Places {
  IntVec token;
  int step;
};

PC_FORCE_INLINE Places places_of(Order order) {
  if (order == Order::Natural) return {iota(), kLanes};
  return {(iota() & (kStreams - 1)) * kStreamTokens + (iota() >> 2), kLanes / kStreams};
}

// What scores are counted from: the maximum, or 0 where nothing is attended to, because -inf - -inf is NaN.
PC_FORCE_INLINE float finite_or_zero(float top) { return top == -kInfinity ? 0.0f : top; }

// scores[64] -> weights exp(score - max), 0 where not attended. Returns the factor for the row's older sums.
PC_FORCE_INLINE float softmax_row(const RowScores& row, float* scores, float& row_max, float& row_sum, Errand& errand) {
  const bool whole = row.low == 0 && row.high == kTileTokens && row.keep == nullptr;
  const Places places = places_of(row.order);
  IntVec index = places.token;
  Vec top = splat(-kInfinity);
#pragma GCC unroll 4
  for (int t = 0; t < kTileTokens; t += kLanes, index += places.step) {
    Vec x = load(scores + t) * row.scale;
    if (row.softcap != 0.0f) x = tanh(x) * row.softcap;
    if (row.slope != 0.0f) x = fma(__builtin_convertvector(index + row.bias_begin, Vec), splat(row.slope), x);
    if (!whole) {
      IntVec attended = (index >= row.low) & (index < row.high);
      if (row.keep != nullptr) {
        const LooseByteVec keep = *reinterpret_cast<const LooseByteVec*>(row.keep + t);
        attended &= __builtin_convertvector(keep, IntVec) != 0;
      }
      x = attended ? x : splat(-kInfinity);
    }
    store(scores + t, x);
    top = max(top, x);
    errand.go();
  }
  const float tile_max = max_lane(top);
  const float old_max = row_max;
  const float new_max = old_max > tile_max ? old_max : tile_max;
  const float origin = finite_or_zero(new_max);
  Vec added = {};
#pragma GCC unroll 4
  for (int t = 0; t < kTileTokens; t += kLanes) {
    const Vec weight = exp(load(scores + t) - origin);
    store(scores + t, weight);
    added += weight;
    errand.go();
  }
  const float factor = old_max == new_max ? 1.0f : exp1(old_max - origin);
  row_max = new_max;
  row_sum = fma(row_sum, factor, sum(added));
  return factor;
}

// (max, sum, acc) += (max, sum, acc) of later keys. Exact where either is empty.
PC_FORCE_INLINE void fold_row(float& total_max, float& total_sum, float* total_acc, float row_max, float row_sum,
                              const float* acc, int64_t dim) {
  const float top = total_max > row_max ? total_max : row_max;
  const float origin = finite_or_zero(top);
  const float old_factor = exp1(total_max - origin);
  const float new_factor = exp1(row_max - origin);
  total_max = top;
  total_sum = fma(total_sum, old_factor, row_sum * new_factor);
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec added = load(acc + d) * new_factor;
    store(total_acc + d, fma(load(total_acc + d), splat(old_factor), added));
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
