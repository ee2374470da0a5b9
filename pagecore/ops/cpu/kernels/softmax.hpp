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
  const Order* order;   // in which the scores stand
  const uint8_t* keep;  // of the keys between, these; null: all. The order is natural then.
  float scale;          // what scores are multiplied by first
  float softcap;        // 0: none. Scores come divided by it.
  float slope;          // 0: none
  int32_t bias_begin;   // tile start - the key whose bias is 0
};

// What scores are counted from: the maximum, or 0 where nothing is attended to, because -inf - -inf is NaN.
PC_FORCE_INLINE float finite_or_zero(float top) { return top == -kInfinity ? 0.0f : top; }

constexpr int kTileVectors = kTileTokens / kLanes;

// Only where a level multiplies pairs. Weights are 0, at least e^-86, or NaN: the machine's own rounding, which takes
// denormals for 0, will do.
PC_FORCE_INLINE void store_weights([[maybe_unused]] const Vec (&x)[kTileVectors], [[maybe_unused]] uint16_t* pairs) {
#if defined(__AVX512BF16__)
#pragma GCC unroll 16
  for (int i = 0; i < kTileVectors; ++i) {
    store_half(pairs + i * kLanes, (HalfVec)_mm512_cvtneps_pbh((__m512)x[i]));
  }
#else
  __builtin_trap();
#endif
}

// Whether nothing but the scale changes the scores.
PC_FORCE_INLINE bool is_plain(const RowScores& row) {
  return row.low == 0 && row.high == kTileTokens && row.keep == nullptr && row.softcap == 0.0f && row.slope == 0.0f;
}

// scores[64] with softcap and bias, -inf where not attended.
PC_FORCE_INLINE void change_scores(const RowScores& row, Vec (&x)[kTileVectors]) {
#pragma GCC unroll 4
  for (int i = 0; i < kTileVectors; ++i) {
    IntVec index;
    __builtin_memcpy(&index, row.order->token + i * kLanes, sizeof index);
    if (row.softcap != 0.0f) x[i] = tanh(x[i]) * row.softcap;
    if (row.slope != 0.0f) x[i] = fma(__builtin_convertvector(index + row.bias_begin, Vec), splat(row.slope), x[i]);
    IntVec attended = (index >= row.low) & (index < row.high);
    if (row.keep != nullptr) {
      const LooseByteVec keep = *reinterpret_cast<const LooseByteVec*>(row.keep + i * kLanes);
      attended &= __builtin_convertvector(keep, IntVec) != 0;
    }
    x[i] = attended ? x[i] : splat(-kInfinity);
  }
}

// scores[64] -> weights exp(score - max), 0 where not attended; in bfloat16 too, where `pairs` is not null. Returns the
// factor for the row's older sums.
PC_FORCE_INLINE float softmax_row(const RowScores& row, float* scores, uint16_t* pairs, float& row_max, float& row_sum,
                                  Errand& errand) {
  Vec x[kTileVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kTileVectors; ++i) {
    x[i] = load(scores + i * kLanes) * row.scale;
    errand.go();
  }
  if (!is_plain(row)) change_scores(row, x);
  Vec top = x[0];
#pragma GCC unroll 16
  for (int i = 1; i < kTileVectors; ++i) top = max(top, x[i]);
  const float tile_max = max_lane(top);
  const float old_max = row_max;
  const float new_max = old_max > tile_max ? old_max : tile_max;
  const float origin = finite_or_zero(new_max);
  Vec added = {};
#pragma GCC unroll 16
  for (int i = 0; i < kTileVectors; ++i) {
    x[i] = exp(x[i] - origin);
    store(scores + i * kLanes, x[i]);
    added += x[i];
    errand.go();
  }
  if (pairs != nullptr) store_weights(x, pairs);
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
