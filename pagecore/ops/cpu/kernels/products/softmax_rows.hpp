// One online-softmax step of several rows that attend to all keys of a tile, with scores that only a scale and the
// factors of tokens modify.
//
// The maximum, the exponentials and the sum of a row depend on each other; those of 4 or 16 rows overlap, and have
// their maxima and sums together. Each row has the bits that softmax_row() gives it.
#pragma once

#include "pagecore/ops/cpu/kernels/products/softmax.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The running maxima and sums of the rows, and the factors that rescale their older sums.
struct RowStats {
  float* max;
  float* sum;
  float* factor;
};

// Numbers of kRows rows, one a lane.
template <int kRows>
struct EachRow;

template <>
struct EachRow<4> {
  using Numbers = Vec4;

  PC_FORCE_INLINE static Vec4 load(const float* from) { return load_four(from); }
  PC_FORCE_INLINE static void store(float* to, Vec4 v) { store_four(to, v); }
  // The numbers in turn. GCC stores and loads a vector that a shuffle widens.
  PC_FORCE_INLINE static Vec wide(Vec4 v) {
#if defined(__AVX512F__)
    return (Vec)_mm512_maskz_broadcast_f32x4(kAllLanes, (__m128)v);
#else
    return repeat(v, Lanes{});
#endif
  }
  PC_FORCE_INLINE static Vec4 narrow(Vec v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
  PC_FORCE_INLINE static Vec4 sums(const Vec (&of)[4]) { return sum_each(of[0], of[1], of[2], of[3]); }
  // Each in the order of max_lane().
  PC_FORCE_INLINE static Vec4 maxima(const Vec (&of)[4]) {
    const auto larger = [](Vec4 a, Vec4 b) __attribute__((always_inline)) { return a > b ? a : b; };
    const Vec4 p = max_to_four(of[0]), q = max_to_four(of[1]), r = max_to_four(of[2]), s = max_to_four(of[3]);
    const Vec4 pq = larger(__builtin_shufflevector(p, q, 0, 1, 4, 5), __builtin_shufflevector(p, q, 2, 3, 6, 7));
    const Vec4 rs = larger(__builtin_shufflevector(r, s, 0, 1, 4, 5), __builtin_shufflevector(r, s, 2, 3, 6, 7));
    return larger(__builtin_shufflevector(pq, rs, 0, 2, 4, 6), __builtin_shufflevector(pq, rs, 1, 3, 5, 7));
  }

 private:
  template <int... I>
  PC_FORCE_INLINE static Vec repeat(Vec4 v, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(v, v, (I % 4)...);
  }
};

#if defined(__AVX512F__)
constexpr int kManyRows = 16;

template <>
struct EachRow<kManyRows> {
  using Numbers = Vec;

  PC_FORCE_INLINE static Vec load(const float* from) { return PC_ISA::load(from); }
  PC_FORCE_INLINE static void store(float* to, Vec v) { PC_ISA::store(to, v); }
  PC_FORCE_INLINE static Vec wide(Vec v) { return v; }
  PC_FORCE_INLINE static Vec narrow(Vec v) { return v; }
  PC_FORCE_INLINE static Vec sums(const Vec (&of)[kManyRows]) { return join_lanes<Add>(of); }
  PC_FORCE_INLINE static Vec maxima(const Vec (&of)[kManyRows]) { return join_lanes<Max>(of); }
};
#else
constexpr int kManyRows = 4;
#endif
constexpr int kFewSoftmaxRows = 4;

// Stores two vectors of weights as bfloat16: see store_weights().
PC_FORCE_INLINE void store_two_weights([[maybe_unused]] Vec first, [[maybe_unused]] Vec second,
                                       [[maybe_unused]] uint16_t* pairs) {
#if defined(__AVX512BF16__)
  store(reinterpret_cast<float*>(pairs), (Vec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
  __builtin_trap();
#endif
}

// Scales the scores [kRows, 64] and returns the maxima of the rows.
template <int kRows, bool kFactors>
PC_FORCE_INLINE auto scale_rows(const float* key_factors, float scale, float* scores, BackgroundPrefetch& background) {
  Vec tops[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    float* const row = scores + r * kTileTokens;
    Vec top{};
#pragma GCC unroll 16
    for (int i = 0; i < kTileVectors; ++i) {
      Vec x = load(row + i * kLanes) * scale;
      if constexpr (kFactors) x = x * load(key_factors + i * kLanes);
      store(row + i * kLanes, x);
      top = i == 0 ? x : max(top, x);
      background.step();
    }
    tops[r] = top;
  }
  return EachRow<kRows>::maxima(tops);
}

// Replaces the scores [kRows, 64] by weights, and returns the sums of the rows. `value_factors` multiply the weights
// but not their sum.
template <int kRows, bool kFactors>
PC_FORCE_INLINE auto weigh_rows(const float* value_factors, const float (&origins)[kRows], float* scores,
                                uint16_t* pairs, BackgroundPrefetch& background) {
  Vec added[kRows];
#pragma GCC unroll 1
  for (int r = 0; r < kRows; ++r) {
    float* const row = scores + r * kTileTokens;
    const Vec origin = splat(origins[r]);
    Vec sum{};
#pragma GCC unroll 16
    for (int i = 0; i < kTileVectors; i += 2) {
      Vec x[2];
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) {
        x[k] = exp(load(row + (i + k) * kLanes) - origin);
        sum += x[k];
        if constexpr (kFactors) x[k] = scaled_weight(x[k], load(value_factors + (i + k) * kLanes));
        store(row + (i + k) * kLanes, x[k]);
        background.step();
      }
      if (pairs != nullptr) store_two_weights(x[0], x[1], pairs + r * kTileTokens + i * kLanes);
    }
    added[r] = sum;
  }
  return EachRow<kRows>::sums(added);
}

// Replaces the scores [kRows, 64] by weights, and also stores them as bfloat16 if `pairs` is not null.
template <int kRows>
PC_FORCE_INLINE void softmax_rows(float scale, const float* key_factors, const float* value_factors, float* scores,
                                  uint16_t* pairs, const RowStats& stats, BackgroundPrefetch& background) {
  using Each = EachRow<kRows>;
  using Numbers = typename Each::Numbers;
  const Numbers tile_max = key_factors != nullptr ? scale_rows<kRows, true>(key_factors, scale, scores, background)
                                                  : scale_rows<kRows, false>(nullptr, scale, scores, background);
  const Numbers old_max = Each::load(stats.max);
  const Numbers new_max = old_max > tile_max ? old_max : tile_max;
  const Numbers from = new_max == -kInfinity ? Numbers{} : new_max;
  alignas(64) float origins[kRows];
  Each::store(origins, from);
  const Numbers added = value_factors != nullptr
                            ? weigh_rows<kRows, true>(value_factors, origins, scores, pairs, background)
                            : weigh_rows<kRows, false>(nullptr, origins, scores, pairs, background);
  const Numbers rescaled = Each::narrow(exp(Each::wide(old_max - from)));
  const Numbers factor = old_max == new_max ? Numbers{} + 1.0f : rescaled;
  const Vec sums = fma(Each::wide(Each::load(stats.sum)), Each::wide(factor), Each::wide(added));
  Each::store(stats.max, new_max);
  Each::store(stats.factor, factor);
  Each::store(stats.sum, Each::narrow(sums));
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
