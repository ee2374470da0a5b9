// Online softmax: scores to weights, a row at a time, with a running maximum and sum per row that are folded every
// kFoldTokens keys.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/cpu/kernels/simd/math.hpp"
#include "pagecore/ops/cpu/kernels/tiles/prefetch.hpp"
#include "pagecore/ops/cpu/kernels/tiles/tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Modifiers of the scores of one row in one tile.
struct RowScores {
  int32_t low, high;           // keys [low, high) of the tile are attended
  const Order* order;          // order of the scores
  const uint8_t* keep;         // mask over the tile; null: none. With a mask the order is natural.
  float scale;                 // multiplies the raw scores
  float softcap;               // 0: none. Scores are already divided by it.
  float slope;                 // 0: none
  int32_t bias_begin;          // tile start minus the key with bias 0
  const float* key_factors;    // [64], multiply the raw scores; null: none
  const float* value_factors;  // [64], multiply the weights of the values, but not their sum; null: none
  // Of a selection: [64], the positions of the tile's keys; bias_begin is then the negative key with bias 0.
  const int32_t* positions = nullptr;
};

// The origin subtracted from scores: the maximum, or 0 if nothing is attended, because -inf - -inf is NaN.
PC_FORCE_INLINE float finite_or_zero(float top) { return top == -kInfinity ? 0.0f : top; }

constexpr int kTileVectors = kTileTokens / kLanes;

// Stores weights as bfloat16; for instruction sets with pairs only. Weights are 0, at least e^-86, or NaN, so the
// hardware rounding, which flushes denormals, is exact enough.
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

// True if only the scale modifies the scores.
PC_FORCE_INLINE bool is_plain(const RowScores& row) {
  return row.low == 0 && row.high == kTileTokens && row.keep == nullptr && row.softcap == 0.0f && row.slope == 0.0f;
}

inline IntVec look_up(const int32_t* table, const IntVec& index) {
  IntVec found;
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = table[index[lane]];
  return found;
}

// Applies softcap and bias to 64 scores; keys that are not attended get -inf.
PC_FORCE_INLINE void change_scores(const RowScores& row, Vec (&x)[kTileVectors]) {
#pragma GCC unroll 4
  for (int i = 0; i < kTileVectors; ++i) {
    IntVec index;
    __builtin_memcpy(&index, row.order->token + i * kLanes, sizeof index);
    if (row.softcap != 0.0f) x[i] = tanh(x[i]) * row.softcap;
    if (row.slope != 0.0f) {
      const IntVec key = row.positions == nullptr ? index : look_up(row.positions, index);
      x[i] = fma(__builtin_convertvector(key + row.bias_begin, Vec), splat(row.slope), x[i]);
    }
    IntVec attended = (index >= row.low) & (index < row.high);
    if (row.keep != nullptr) {
      const LooseByteVec keep = *reinterpret_cast<const LooseByteVec*>(row.keep + i * kLanes);
      attended &= __builtin_convertvector(keep, IntVec) != 0;
    }
    x[i] = attended ? x[i] : splat(-kInfinity);
  }
}

// weight * factor. A weight of 0 stays 0 even if the factor of a token to which the row does not attend is NaN.
PC_FORCE_INLINE Vec scaled_weight(Vec weight, Vec factor) {
#if defined(__AVX512F__)
  const __mmask16 attended = _mm512_cmp_ps_mask((__m512)weight, __m512{}, _CMP_NEQ_UQ);
  return (Vec)_mm512_maskz_mul_ps(attended, (__m512)weight, (__m512)factor);
#else
  return (Vec)((IntVec)(weight * factor) & (IntVec)(weight != 0.0f));
#endif
}

// Multiplies weights with the factors of their values, and stores them.
PC_FORCE_INLINE void scale_weights(const float* factors, Vec (&x)[kTileVectors], float* scores) {
#pragma GCC unroll 16
  for (int i = 0; i < kTileVectors; ++i) {
    x[i] = scaled_weight(x[i], load(factors + i * kLanes));
    store(scores + i * kLanes, x[i]);
  }
}

// Replaces 64 scores by weights exp(score - max), 0 for keys that are not attended, and also stores them as bfloat16 if
// `pairs` is not null. Returns the factor that rescales the older sums of the row.
PC_FORCE_INLINE float softmax_row(const RowScores& row, float* scores, uint16_t* pairs, float& row_max, float& row_sum,
                                  BackgroundPrefetch& background) {
  Vec x[kTileVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kTileVectors; ++i) {
    x[i] = load(scores + i * kLanes) * row.scale;
    background.step();
  }
  if (row.key_factors != nullptr) {
#pragma GCC unroll 16
    for (int i = 0; i < kTileVectors; ++i) x[i] = x[i] * load(row.key_factors + i * kLanes);
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
    background.step();
  }
  if (row.value_factors != nullptr) scale_weights(row.value_factors, x, scores);
  if (pairs != nullptr) store_weights(x, pairs);
  const float factor = old_max == new_max ? 1.0f : exp1(old_max - origin);
  row_max = new_max;
  row_sum = fma(row_sum, factor, sum(added));
  return factor;
}

// Adds the (max, sum, acc) of later keys to a total. Exact if either is empty.
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

// Adds the sums of `rows` rows since the last fold to their totals, and clears the sums. The first fold initialises the
// total accumulators.
PC_FORCE_INLINE void fold_sums(const Scratch& scratch, int64_t rows, int64_t stride, bool first) {
  if (first) {
    for (int64_t i = 0; i < rows * stride; i += kLanes) store(scratch.total_acc + i, Vec{});
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* acc = scratch.acc + row * stride;
    fold_row(scratch.total_max[row], scratch.total_sum[row], scratch.total_acc + row * stride, scratch.max[row],
             scratch.sum[row], acc, stride);
    scratch.max[row] = -kInfinity;
    scratch.sum[row] = 0.0f;
    for (int64_t d = 0; d < stride; d += kLanes) store(acc + d, Vec{});
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
