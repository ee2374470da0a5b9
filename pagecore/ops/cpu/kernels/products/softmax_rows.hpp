// One online-softmax step of four rows that attend to all keys of a tile, with scores that only a scale and the factors
// of tokens modify.
//
// The maximum, the exponentials and the sum of a row depend on each other; those of four rows overlap. Each row has the
// bits that softmax_row() gives it.
#pragma once

#include "pagecore/ops/cpu/kernels/products/softmax.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr int kSoftmaxRows = 4;

// The running maxima and sums of the rows, and the factors that rescale their older sums.
struct RowStats {
  float* max;
  float* sum;
  float* factor;
};

template <int... I>
PC_FORCE_INLINE Vec repeat_four(Vec4 v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I % 4)...);
}

// The maxima of the lanes of four vectors, each in the order of max_lane().
PC_FORCE_INLINE Vec4 max_each(const Vec (&tops)[kSoftmaxRows]) {
  const auto larger = [](Vec4 a, Vec4 b) __attribute__((always_inline)) { return a > b ? a : b; };
  const Vec4 p = max_to_four(tops[0]), q = max_to_four(tops[1]), r = max_to_four(tops[2]), s = max_to_four(tops[3]);
  const Vec4 pq = larger(__builtin_shufflevector(p, q, 0, 1, 4, 5), __builtin_shufflevector(p, q, 2, 3, 6, 7));
  const Vec4 rs = larger(__builtin_shufflevector(r, s, 0, 1, 4, 5), __builtin_shufflevector(r, s, 2, 3, 6, 7));
  return larger(__builtin_shufflevector(pq, rs, 0, 2, 4, 6), __builtin_shufflevector(pq, rs, 1, 3, 5, 7));
}

// Stores two vectors of weights as bfloat16: see store_weights().
PC_FORCE_INLINE void store_two_weights([[maybe_unused]] Vec first, [[maybe_unused]] Vec second,
                                       [[maybe_unused]] uint16_t* pairs) {
#if defined(__AVX512BF16__)
  store(reinterpret_cast<float*>(pairs), (Vec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
  __builtin_trap();
#endif
}

// Scales the scores [4, 64] and returns the maxima of the rows.
template <bool kFactors>
PC_FORCE_INLINE Vec4 scale_rows(const float* key_factors, float scale, float* scores, BackgroundPrefetch& background) {
  Vec tops[kSoftmaxRows] = {};
  for (int i = 0; i < kTileVectors; ++i) {
    Vec factors{};
    if constexpr (kFactors) factors = load(key_factors + i * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kSoftmaxRows; ++r) {
      float* at = scores + r * kTileTokens + i * kLanes;
      Vec x = load(at) * scale;
      if constexpr (kFactors) x = x * factors;
      store(at, x);
      tops[r] = i == 0 ? x : max(tops[r], x);
      background.step();
    }
  }
  return max_each(tops);
}

// Replaces the scores [4, 64] by weights, and returns the sums of the rows. `value_factors` multiply the weights but
// not their sum.
template <bool kFactors>
PC_FORCE_INLINE Vec4 weigh_rows(const float* value_factors, Vec4 origins, float* scores, uint16_t* pairs,
                                BackgroundPrefetch& background) {
  Vec added[kSoftmaxRows] = {};
  const Vec origin[kSoftmaxRows] = {splat(origins[0]), splat(origins[1]), splat(origins[2]), splat(origins[3])};
  for (int i = 0; i < kTileVectors; i += 2) {
    Vec factors[2] = {};
#pragma GCC unroll 4
    for (int r = 0; r < kSoftmaxRows; ++r) {
      float* at = scores + r * kTileTokens + i * kLanes;
      Vec x[2];
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) {
        x[k] = exp(load(at + k * kLanes) - origin[r]);
        added[r] += x[k];
        if constexpr (kFactors) {
          factors[k] = load(value_factors + (i + k) * kLanes);
          x[k] = scaled_weight(x[k], factors[k]);
        }
        store(at + k * kLanes, x[k]);
        background.step();
      }
      if (pairs != nullptr) store_two_weights(x[0], x[1], pairs + r * kTileTokens + i * kLanes);
    }
  }
  return sum_each(added[0], added[1], added[2], added[3]);
}

// Replaces the scores [4, 64] of four rows by weights, and also stores them as bfloat16 if `pairs` is not null.
inline void softmax_rows(float scale, const float* key_factors, const float* value_factors, float* scores,
                         uint16_t* pairs, const RowStats& stats, BackgroundPrefetch& background) {
  const Vec4 tile_max = key_factors != nullptr ? scale_rows<true>(key_factors, scale, scores, background)
                                               : scale_rows<false>(nullptr, scale, scores, background);
  const Vec4 old_max = load_four(stats.max);
  const Vec4 new_max = old_max > tile_max ? old_max : tile_max;
  const Vec4 origins = new_max == -kInfinity ? Vec4{} : new_max;
  const Vec4 added = value_factors != nullptr ? weigh_rows<true>(value_factors, origins, scores, pairs, background)
                                              : weigh_rows<false>(nullptr, origins, scores, pairs, background);
  const Vec rescaled = exp(repeat_four(old_max - origins, Lanes{}));
  const Vec4 factor = old_max == new_max ? Vec4{} + 1.0f : __builtin_shufflevector(rescaled, rescaled, 0, 1, 2, 3);
  const Vec sums =
      fma(repeat_four(load_four(stats.sum), Lanes{}), repeat_four(factor, Lanes{}), repeat_four(added, Lanes{}));
  store_four(stats.max, new_max);
  store_four(stats.factor, factor);
  store_four(stats.sum, __builtin_shufflevector(sums, sums, 0, 1, 2, 3));
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
