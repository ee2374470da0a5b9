// Weights of few query rows times values from their codes, by exact products of integers.
//
// Weights, times the scales of groups, become int16 times the largest magnitude of a row in the tile / 32767. The
// values of two tokens are multiplied and added at once, and a tile is added in int32:
//
//   stored bytes   t      a0 a1 a2 ..     words of both in turn   a0 a1 b0 b1 a2 a3 b2 b3 ..
//                  t + 1  b0 b1 b2 ..     even, odd bytes         a0 b0 a2 b2 ..    a1 b1 a3 b3 ..
//
// Four vectors of sums have 16 dims in each quarter of their lanes, which share a scale.
#pragma once

#include "pagecore/ops/cpu/kernels/integer_scores.hpp"
#include "pagecore/ops/cpu/kernels/multiply.hpp"
#include "pagecore/ops/cpu/kernels/transpose.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

constexpr int64_t kTilePairs = kTileTokens / 2;

// The weights of a tile in int16, [groups, kCodeRows, 64], and what a sum of a row means.
struct IntegerWeights {
  const int16_t* words;
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

// Writes the scales of groups of 16 as numbers, [groups, 64], and the bits of the largest magnitude of each token.
inline void transpose_scales(const Cache& cache, const StoredTile& tile, float* numbers, int32_t* largest) {
  const int64_t groups = cache.dim / 16;
  for (int t = 0; t < kTileTokens; ++t) largest[t] = 0;
  for (int64_t g = 0; g < groups; g += 8) {
    const int64_t count = groups - g < 8 ? 4 : 8;
    alignas(64) char bytes[8 * kTileTokens];
    for (int t = 0; t < kTileTokens; t += 8) transpose_scale_bytes(tile.scales + t, g, count, bytes + t);
    for (int64_t i = 0; i < count; ++i, numbers += kTileTokens) {
      for (int t = 0; t < kTileTokens; t += kLanes) {
        const Vec scale = numbers_of_scales(cache.format, load_scales(bytes + i * kTileTokens + t));
        auto* const top = reinterpret_cast<float*>(largest + t);
        store(numbers + t, scale);
        store(top, (Vec)max((IntVec)load(top), (IntVec)scale & kMagnitudeBits));
      }
    }
  }
}

// The bits of the largest weight of a row times the number of its token in `largest`, which may be null.
PC_FORCE_INLINE int32_t largest_weight(const float* weights, const int32_t* largest) {
  IntVec bits{};
  for (int t = 0; t < kTileTokens; t += kLanes) {
    Vec weight = load(weights + t);
    if (largest != nullptr) weight = weight * load(reinterpret_cast<const float*>(largest + t));
    bits = max(bits, (IntVec)weight & kMagnitudeBits);
  }
  return largest_lane(bits);
}

// Makes the weights of `rows` integers. Returns false if one is infinite or NaN, or a row too small.
template <typename Codes>
inline bool make_integer_weights(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                                 const Scratch& scratch, IntegerWeights& made) {
  auto* words = reinterpret_cast<int16_t*>(scratch.value);
  made.words = words;
  const int64_t groups = Codes::kGroup == 0 ? 1 : cache.dim / 16;
  // Groups are multiplied by vectors, up to 8 of them.
  float* const scales = scratch.value + (groups + 7) / 8 * 8 * kCodeRows * kTilePairs;
  alignas(64) int32_t largest[kTileTokens];
  if constexpr (Codes::kGroup != 0) transpose_scales(cache, tile, scales, largest);
  alignas(64) float zero_points[kTileTokens];
  if constexpr (Codes::kHasZeroPoints) load_zero_points(tile, zero_points);
  for (int64_t r = 0; r < rows.count; ++r) {
    const float* row = rows.scores + r * kTileTokens;
    float factor;
    const int32_t top = largest_weight(row, Codes::kGroup == 0 ? nullptr : largest);
    if (!integer_factor(top, factor, made.units[r])) return false;
    made.units[r] *= Codes::kUnit;
    Vec excess{};
    for (int t = 0; t < kTileTokens; t += 2 * kLanes) {
      const Vec low = load(row + t) * factor, high = load(row + t + kLanes) * factor;
      for (int64_t g = 0; g < groups; ++g) {
        IntVec rounded[2] = {nearest(low), nearest(high)};
        if constexpr (Codes::kGroup != 0) {
          const float* scale = scales + g * kTileTokens + t;
          rounded[0] = nearest(low * load(scale)), rounded[1] = nearest(high * load(scale + kLanes));
        }
        if constexpr (Codes::kHasZeroPoints) {
          excess = fma(to_floats(rounded[0]), load(zero_points + t), excess);
          excess = fma(to_floats(rounded[1]), load(zero_points + t + kLanes), excess);
        }
        store_shorts(words + (g * kCodeRows + r) * kTileTokens + t, rounded[0], rounded[1]);
      }
    }
    made.excess[r] = sum(excess);
  }
  return true;
}

// The weights of two tokens, with those of another group in each quarter if groups have their own.
template <typename Codes>
PC_FORCE_INLINE Shorts weight_pair(const int16_t* words) {
  typedef int32_t Pair __attribute__((may_alias, aligned(2)));
  const auto* pair = reinterpret_cast<const Pair*>(words);
  IntVec weights = IntVec{} + *pair;
  if constexpr (Codes::kGroup != 0) {
    constexpr int64_t kNext = 2 * kCodeRows * kTilePairs;
#if defined(__AVX512F__)
    weights = (IntVec)_mm512_mask_set1_epi32((__m512i)weights, 0x00f0, pair[kNext]);
    weights = (IntVec)_mm512_mask_set1_epi32((__m512i)weights, 0x0f00, pair[2 * kNext]);
    weights = (IntVec)_mm512_mask_set1_epi32((__m512i)weights, 0xf000, pair[3 * kNext]);
#else
    weights = (IntVec)_mm256_blend_epi32((__m256i)weights, _mm256_set1_epi32(pair[kNext]), 0xf0);
#endif
  }
  return (Shorts)weights;
}

// Sums over a tile of the words of one part, for R rows. `words` are the weights of the first row.
template <typename Codes, int kHalf, int kPart, int R, bool kPrefetches>
PC_FORCE_INLINE void multiply_values(const StoredTile& tile, int64_t at, int64_t bytes, const int16_t* words,
                                     const PassAhead& next, Vec (&out)[R][4], int place) {
  const PassAhead ahead = next;
  const Codes codes;
  IntVec sums[R][2] = {};
  for (int t = 0; t < kTileTokens; t += 2) {
    if constexpr (kPrefetches) ahead.prefetch(t);
    const Bytes a = load_stored(tile.codes[t] + at, bytes - at), b = load_stored(tile.codes[t + 1] + at, bytes - at);
    Shorts pairs[2];
    codes.template words<kPart>(zip_words<kHalf>(a, b), pairs);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Shorts weight = weight_pair<Codes>(words + r * kTileTokens + t);
      sums[r][0] = add_pairs(sums[r][0], pairs[0], weight);
      sums[r][1] = add_pairs(sums[r][1], pairs[1], weight);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    out[r][place] = to_floats(sums[r][0]);
    out[r][place + 1] = to_floats(sums[r][1]);
  }
}

// Four vectors of sums in the order of the dims, 16 in each quarter of the tile's codes.
template <typename Codes>
PC_FORCE_INLINE void order_sums(Vec (&v)[4]) {
  Vec p[4];
  if constexpr (Codes::kParts == 1) {
    p[0] = zip_low(v[0], v[1]), p[1] = zip_high(v[0], v[1]), p[2] = zip_low(v[2], v[3]), p[3] = zip_high(v[2], v[3]);
  } else {
    const Vec a = zip_low(v[0], v[1]), b = zip_low(v[2], v[3]), c = zip_high(v[0], v[1]), d = zip_high(v[2], v[3]);
    p[0] = zip_low(a, b), p[1] = zip_high(a, b), p[2] = zip_low(c, d), p[3] = zip_high(c, d);
  }
#if defined(__AVX512F__)
  transpose_quarters(p[0], p[1], p[2], p[3], v);
#else
  v[0] = even_quarters(p[0], p[1]), v[1] = even_quarters(p[2], p[3]);
  v[2] = odd_quarters(p[0], p[1]), v[3] = odd_quarters(p[2], p[3]);
#endif
}

// Adds the sums of R rows over the dims of a vector of stored bytes; those of 4-bit codes in two halves.
template <typename Codes, int kHalf, int R, bool kPrefetches>
void add_values(const HeadRows& rows, int64_t row, const Cache& cache, const StoredTile& tile, int64_t at,
                const IntegerWeights& weights, PassAhead ahead, int64_t pass) {
  constexpr int64_t kRun = 16 * Codes::kParts;  // dims from one quarter to the next
  const int64_t bytes = row_bytes(cache), first = at * Codes::kParts + 16 * kHalf;
  const int64_t group = Codes::kGroup == 0 ? 0 : first / 16;
  const int16_t* const words = weights.words + (group * kCodeRows + row) * kTileTokens;
  // The second sums are of the high half of the words, or of the high nibbles.
  constexpr int kSecondHalf = Codes::kParts == 1 ? 1 : kHalf, kSecondPart = Codes::kParts - 1;
  Vec sums[R][4];
  multiply_values<Codes, kHalf, 0, R, kPrefetches>(tile, at, bytes, words, ahead, sums, 0);
  ahead.begin(pass + 1);
  multiply_values<Codes, kSecondHalf, kSecondPart, R, kPrefetches>(tile, at, bytes, words, ahead, sums, 2);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* const acc = rows.acc + (row + r) * rows.acc_stride;
    order_sums<Codes>(sums[r]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t d = first + i * kLanes / 16 * kRun + i * kLanes % 16;
      if (d >= cache.dim) break;
      const Vec sum = (sums[r][i] - weights.excess[row + r]) * weights.units[row + r];
      add_product(acc + d, sum, rows.factor + row + r);
    }
  }
}

// Adds the products of all rows, which attend to the same keys. Returns false, having added nothing, if the weights
// cannot be integers.
inline bool accumulate_integers(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                                const NextRows& next_rows, const Scratch& scratch) {
  return with_integers(cache.format, [&]<typename Codes>() {
    IntegerWeights weights;
    if (!make_integer_weights<Codes>(rows, cache, tile, scratch, weights)) return false;
    prefetch_all_scales(next_rows);
    const int64_t bytes = row_bytes(cache);
    PassAhead ahead(next_rows, 2 * Codes::kParts * ((bytes + kByteLanes - 1) / kByteLanes));
    for_each_even_block(rows.count, [&]<int R>(int64_t row) {
      int64_t pass = 0;
      const auto add = [&]<int kHalf>(int64_t at) {
        if (row == 0 && ahead.begin(pass)) {
          add_values<Codes, kHalf, R, true>(rows, row, cache, tile, at, weights, ahead, pass);
        } else {
          add_values<Codes, kHalf, R, false>(rows, row, cache, tile, at, weights, ahead, pass);
        }
        pass += 2;
      };
      for (int64_t at = 0; at < bytes; at += kByteLanes) {
        add.template operator()<0>(at);
        if constexpr (Codes::kParts == 2) add.template operator()<1>(at);
      }
    });
    return true;
  });
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
