// Weights of few query rows as integers, for their products with values (integer_values.hpp): times the scales of
// groups, if there are any, and times a factor that makes the largest magnitude of a row in the tile 32767.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/weight_ranges.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

constexpr int64_t kTilePairs = kTileTokens / 2;

// The weights of a tile in int16, [groups, kCodeRows, 64], and what a sum of a row and group means.
struct IntegerWeights {
  int16_t* words;
  float* of_groups;  // [groups]; units, besides those of rows
  float units[kCodeRows];
  float excess[kCodeRows];  // sum of weights times zero points
};

// The weights of a row and a group.
PC_FORCE_INLINE int16_t* words_of(const IntegerWeights& weights, int64_t group, int64_t row) {
  return weights.words + (group * kCodeRows + row) * kTileTokens;
}

// Writes the integers of the weights of a row times `factor`, and the scales [groups, 64] of groups.
template <typename Codes>
PC_FORCE_INLINE void round_weights(const float* row, int64_t r, float factor, [[maybe_unused]] int64_t groups,
                                   [[maybe_unused]] const float* scales, [[maybe_unused]] const float* zero_points,
                                   IntegerWeights& made) {
  [[maybe_unused]] Vec excess{};
  for (int t = 0; t < kTileTokens; t += 2 * kLanes) {
    const Vec low = load(row + t) * factor, high = load(row + t + kLanes) * factor;
    if constexpr (kHasGroups<Codes>) {
#pragma GCC unroll 4
      for (int64_t g = 0; g < groups; ++g) {
        const float* const scale = scales + g * kTileTokens + t;
        store_shorts(words_of(made, g, r) + t, nearest(low * load(scale)), nearest(high * load(scale + kLanes)));
      }
    } else {
      const IntVec rounded[2] = {nearest(low), nearest(high)};
      if constexpr (Codes::kHasZeroPoints) {
        excess = fma(to_floats(rounded[0]), load(zero_points + t), excess);
        excess = fma(to_floats(rounded[1]), load(zero_points + t + kLanes), excess);
      }
      store_shorts(words_of(made, 0, r) + t, rounded[0], rounded[1]);
    }
  }
  made.excess[r] = sum(excess);
}

// Makes the weights of `rows` integers. Returns false if a row has none.
template <typename Codes>
inline bool make_integer_weights(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                                 const Scratch& scratch, IntegerWeights& made) {
  constexpr bool kGroups = kHasGroups<Codes>;
  const int64_t groups = kGroups ? cache.dim / 16 : 1;
  float* const scales = scratch.value + groups * kCodeRows * kTilePairs;
  made.words = reinterpret_cast<int16_t*>(scratch.value);
  made.of_groups = scales + groups * kTileTokens;
  [[maybe_unused]] ScaleRange range;
  if constexpr (kGroups) {
    transpose_scales(cache, tile, scales);
    range = divide_scales(scales, groups, Codes::kUnit, made.of_groups);
  }
  alignas(64) float zero_points[kTileTokens];
  if constexpr (Codes::kHasZeroPoints) load_zero_points(tile, zero_points);
  for (int64_t r = 0; r < rows.count; ++r) {
    const float* const row = rows.scores + r * kTileTokens;
    float factor;
    if constexpr (kGroups) {
      if (!weight_factor(row, range, kLargestShort, factor, made.units[r])) return false;
    } else if (!weight_factor(row, kLargestShort, factor, made.units[r])) {
      return false;
    }
    round_weights<Codes>(row, r, factor, groups, scales, zero_points, made);
  }
  return true;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
