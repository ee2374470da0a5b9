// Weights of few query rows as integers, for their products with values (integer_values.hpp): times the scales of
// groups, if there are any, and times a factor that makes the largest magnitude of a row in the tile 32767.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/weight_ranges.hpp"
#include "pagecore/ops/cpu/kernels/simd/quads.hpp"
#include "pagecore/ops/cpu/kernels/simd/transpose.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

constexpr int64_t kTilePairs = kTileTokens / 2;

// The weights of a tile in int16, [groups, kCodeRows, 64], those of groups in the order of words_of(), and what a sum
// of a row and group means.
struct IntegerWeights {
  int16_t* words;
  float* of_groups;  // [groups]; units, besides those of rows
  float units[kCodeRows];
  float excess[kCodeRows];  // sum of weights times zero points
};

// Transposes 8 scale bytes of 8 tokens, `bytes` of which are read: group g is at to + 64 g.
PC_FORCE_INLINE void transpose_scale_bytes(const char* const* rows, int64_t from, int64_t bytes, char* to) {
  __m128i row[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    int64_t read = 0;
    __builtin_memcpy(&read, rows[i] + from, bytes == 8 ? 8 : 4);
    row[i] = _mm_cvtsi64_si128(read);
  }
  const __m128i a = _mm_unpacklo_epi8(row[0], row[1]), b = _mm_unpacklo_epi8(row[2], row[3]);
  const __m128i c = _mm_unpacklo_epi8(row[4], row[5]), d = _mm_unpacklo_epi8(row[6], row[7]);
  const __m128i ab[2] = {_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)};
  const __m128i cd[2] = {_mm_unpacklo_epi16(c, d), _mm_unpackhi_epi16(c, d)};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i, to += 4 * kTileTokens) {
    const __m128i first = _mm_unpacklo_epi32(ab[i], cd[i]), second = _mm_unpackhi_epi32(ab[i], cd[i]);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), first);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + kTileTokens), _mm_unpackhi_epi64(first, first));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 2 * kTileTokens), second);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 3 * kTileTokens), _mm_unpackhi_epi64(second, second));
  }
}

// Writes the scales of groups of 16 as numbers, [groups, 64].
inline void transpose_scales(const Cache& cache, const StoredTile& tile, float* numbers) {
  const int64_t groups = cache.dim / 16;
  for (int64_t g = 0; g < groups; g += 8) {
    const int64_t count = groups - g < 8 ? 4 : 8;
    alignas(64) char bytes[8 * kTileTokens];
    for (int t = 0; t < kTileTokens; t += 8) transpose_scale_bytes(tile.scales + t, g, count, bytes + t);
    for (int64_t i = 0; i < count; ++i, numbers += kTileTokens) {
      for (int t = 0; t < kTileTokens; t += kLanes) {
        store(numbers + t, numbers_of_scales(cache.format, load_scales(bytes + i * kTileTokens + t)));
      }
    }
  }
}

// Weights of a row and group, or of the groups g, g + 2, g + 4 and g + 6 of eight, which AVX-512 multiplies at once: a
// pair of tokens of each in turn.
template <typename Codes>
constexpr int64_t kRunWords = Codes::kGroup != 0 && kLanes == 16 ? 4 * kTileTokens : kTileTokens;

// The weights of a row and a group, which is the first of those that are multiplied at once.
template <typename Codes>
PC_FORCE_INLINE int16_t* words_of(const IntegerWeights& weights, int64_t group, int64_t row) {
  const int64_t run = kRunWords<Codes> == kTileTokens ? group : group / 8 * 2 + group % 2;
  return weights.words + (run * kCodeRows + row) * kRunWords<Codes>;
}

#if defined(__AVX512F__)
// The place of the pair of tokens t and t + 1 in a run of four groups, which has their pairs by transposed squares.
PC_FORCE_INLINE int64_t place_of_pair(int64_t t) {
  const int64_t pair = t / 2;
  return 8 * (pair / 16 * 16 + (pair / 8 % 2 * 2 + pair % 2) * 4 + pair % 8 / 2);
}
#endif

// Writes the integers of the weights of tokens t .. t + 2 kLanes times the scales [groups, 64].
template <typename Codes>
PC_FORCE_INLINE void scale_weights(Vec low, Vec high, int64_t r, int t, int64_t groups, const float* scales,
                                   IntegerWeights& made) {
  const auto of_group = [&](int64_t g, int half) __attribute__((always_inline)) {
    return nearest((half == 0 ? low : high) * load(scales + g * kTileTokens + t + half * kLanes));
  };
#if defined(__AVX512F__)
  for (int64_t first = 0; first < groups; first += first % 2 == 0 ? 1 : 7) {
    Vec run[4] = {};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t g = first + 2 * i;
      if (g < groups) run[i] = (Vec)pack_dwords(of_group(g, 0), of_group(g, 1));
    }
    transpose_squares(run);
    auto* const to = reinterpret_cast<float*>(words_of<Codes>(made, first, r) + 4 * t);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) store(to + i * kLanes, run[i]);
  }
#else
  for (int64_t g = 0; g < groups; ++g) {
    store_shorts(words_of<Codes>(made, g, r) + t, of_group(g, 0), of_group(g, 1));
  }
#endif
}

// Writes the integers of the weights of a row times `factor`, and the scales [groups, 64] of groups.
template <typename Codes>
PC_FORCE_INLINE void round_weights(const float* row, int64_t r, float factor, [[maybe_unused]] int64_t groups,
                                   [[maybe_unused]] const float* scales, [[maybe_unused]] const float* zero_points,
                                   IntegerWeights& made) {
  [[maybe_unused]] Vec excess{};
  for (int t = 0; t < kTileTokens; t += 2 * kLanes) {
    const Vec low = load(row + t) * factor, high = load(row + t + kLanes) * factor;
    if constexpr (Codes::kGroup != 0) {
      scale_weights<Codes>(low, high, r, t, groups, scales, made);
    } else {
      const IntVec rounded[2] = {nearest(low), nearest(high)};
      if constexpr (Codes::kHasZeroPoints) {
        excess = fma(to_floats(rounded[0]), load(zero_points + t), excess);
        excess = fma(to_floats(rounded[1]), load(zero_points + t + kLanes), excess);
      }
      store_shorts(words_of<Codes>(made, 0, r) + t, rounded[0], rounded[1]);
    }
  }
  made.excess[r] = sum(excess);
}

// Makes the weights of `rows` integers. Returns false if a row has none.
template <typename Codes>
inline bool make_integer_weights(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                                 const Scratch& scratch, IntegerWeights& made) {
  constexpr bool kGroups = Codes::kGroup != 0;
  const int64_t groups = kGroups ? cache.dim / 16 : 1;
  // Groups are multiplied by vectors, up to 8 of them.
  float* const scales = scratch.value + (groups + 7) / 8 * 8 * kCodeRows * kTilePairs;
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

// The weights of row r and two tokens, with those of another group in each quarter if groups have their own.
template <typename Codes>
PC_FORCE_INLINE Shorts weight_pair(const int16_t* words, int64_t r, int64_t t) {
  typedef int32_t Pair __attribute__((may_alias, aligned(2)));
  words += r * kRunWords<Codes>;
#if defined(__AVX512F__)
  if constexpr (Codes::kGroup != 0) {
    const auto* const pairs = reinterpret_cast<const __m128*>(words + place_of_pair(t));
    const auto quarters = (__m512i)IntVec{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    return (Shorts)_mm512_maskz_permutevar_ps(kAllLanes, _mm512_maskz_broadcast_f32x4(kAllLanes, *pairs), quarters);
  }
#endif
  const auto* const pair = reinterpret_cast<const Pair*>(words + t);
  const IntVec weights = IntVec{} + *pair;
#if !defined(__AVX512F__)
  if constexpr (Codes::kGroup != 0) {
    constexpr int64_t kNext = 2 * kCodeRows * kTilePairs;
    return (Shorts)_mm256_blend_epi32((__m256i)weights, _mm256_set1_epi32(pair[kNext]), 0xf0);
  }
#endif
  return (Shorts)weights;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
