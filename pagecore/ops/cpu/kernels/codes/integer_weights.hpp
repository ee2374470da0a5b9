// Weights of few query rows as integers, for their products with values (integer_values.hpp): times a factor that makes
// the largest magnitude of a row in the tile 32767, and times the scales of groups, if there are any.
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

// The nearest integers of a * b / 2^15.
PC_FORCE_INLINE Shorts multiply_fractions(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_maskz_mulhrs_epi16(~__mmask32{0}, (__m512i)a, (__m512i)b);
#else
  return (Shorts)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b);
#endif
}

// Writes the integers of the weights [64] of a row times `factor`. Returns the sum of integers times zero points.
template <bool kZeroPoints>
PC_FORCE_INLINE float round_weights(const float* row, float factor, [[maybe_unused]] const Vec* zero_points,
                                    int16_t* to) {
  [[maybe_unused]] Vec excess{};
#pragma GCC unroll 4
  for (int t = 0; t < kTileTokens; t += 2 * kLanes) {
    const IntVec low = nearest(load(row + t) * factor), high = nearest(load(row + t + kLanes) * factor);
    if constexpr (kZeroPoints) {
      excess = fma(to_floats(low), zero_points[t / kLanes], excess);
      excess = fma(to_floats(high), zero_points[t / kLanes + 1], excess);
    }
    store_shorts(to + t, low, high);
  }
  return sum(excess);
}

// Makes the weights of `rows` times the scales of groups integers. Returns false if a row has none.
template <typename Codes>
inline bool make_group_weights(const HeadRows& rows, const Cache& cache, const StoredTile& tile, float* numbers,
                               IntegerWeights& made) {
  const int64_t groups = cache.dim / Codes::kGroup;
  auto* const scales = reinterpret_cast<int16_t*>(numbers + groups * kTileTokens);
  transpose_scales(cache, tile, numbers);
  LeastScales least;
  // A product of two integers of 15 bits is divided by 2^15.
  const float unit = Codes::kUnit * 0x1p15f;
  if (!make_integer_scales(numbers, groups, unit, scales, made.of_groups, least)) return false;
  for (int64_t r = 0; r < rows.count; ++r) {
    const float* const row = rows.scores + r * kTileTokens;
    alignas(64) int16_t words[kTileTokens];
    float factor;
    if (!weight_factor(row, least, factor, made.units[r])) return false;
    round_weights<false>(row, factor, nullptr, words);
    for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 4
      for (int t = 0; t < kTileTokens; t += kWordLanes) {
        const Shorts scale = load_shorts(scales + g * kTileTokens + t);
        *reinterpret_cast<LooseShorts*>(words_of(made, g, r) + t) = multiply_fractions(load_shorts(words + t), scale);
      }
    }
  }
  return true;
}

// Makes the weights of `rows` integers. Returns false if a row has none.
template <typename Codes>
inline bool make_integer_weights(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                                 const Scratch& scratch, IntegerWeights& made) {
  const int64_t groups = kHasGroups<Codes> ? cache.dim / 16 : 1;
  made.words = reinterpret_cast<int16_t*>(scratch.value);
  made.of_groups = scratch.value + groups * kCodeRows * kTilePairs;
  if constexpr (kHasGroups<Codes>) {
    return make_group_weights<Codes>(rows, cache, tile, made.of_groups + padded(groups), made);
  }
  [[maybe_unused]] Vec zero_points[kTokenVectors];
  if constexpr (Codes::kHasZeroPoints) load_zero_points(tile, zero_points);
  for (int64_t r = 0; r < rows.count; ++r) {
    const float* const row = rows.scores + r * kTileTokens;
    float factor;
    if (!weight_factor(row, kLargestShort, factor, made.units[r])) return false;
    made.excess[r] = round_weights<Codes::kHasZeroPoints>(row, factor, zero_points, words_of(made, 0, r));
  }
  return true;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
