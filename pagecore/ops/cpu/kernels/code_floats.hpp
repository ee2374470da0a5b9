// Scores and sums of few query rows from codes of 8 bits, which become float32 in registers.
//
// The bits of a float8 number, moved to the top of a word, are those of a float16 number: e5m2 is one, and e4m3 is 256
// times as large if its sign is moved apart. Instructions for float16 widen subnormals, infinities and NaN. The NaN of
// e4m3 would become a number, so codes are compared with it.
#pragma once

#include "pagecore/ops/cpu/kernels/few_rows.hpp"
#include "pagecore/ops/cpu/kernels/integer_codes.hpp"
#include "pagecore/ops/cpu/kernels/multiply.hpp"
#include "pagecore/ops/cpu/kernels/values.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

// kWordLanes codes, sign-extended.
PC_FORCE_INLINE Shorts load_signed(const char* p) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_maskz_cvtepi8_epi16(~__mmask32{0}, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
}

// kWordLanes codes as the high bytes of words.
PC_FORCE_INLINE Words load_high(const char* p) {
#if defined(__AVX512BW__)
  return (Words)(load_signed(p) << 8);
#else
  const __m256i order = _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7,  //
                                         -1, 8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15);
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (Words)_mm256_shuffle_epi8(twice, order);
#endif
}

PC_FORCE_INLINE void widen_halves(Words words, Vec (&numbers)[2]) {
#if defined(__AVX512F__)
  const auto longs = (__m512i)words;
  numbers[0] = widen_f16((HalfVec)__builtin_shufflevector(longs, longs, 0, 1, 2, 3));
  numbers[1] = widen_f16((HalfVec)__builtin_shufflevector(longs, longs, 4, 5, 6, 7));
#else
  numbers[0] = widen_f16((HalfVec)_mm256_castsi256_si128((__m256i)words));
  numbers[1] = widen_f16((HalfVec)_mm256_extracti128_si256((__m256i)words, 1));
#endif
}

// words, or NaN where a == b.
PC_FORCE_INLINE Words nan_where_equal(Words words, Words a, Words b) {
#if defined(__AVX512BW__)
  return (Words)_mm512_mask_set1_epi16((__m512i)words, _mm512_cmpeq_epi16_mask((__m512i)a, (__m512i)b), 0x7fff);
#else
  return words | (Words)_mm256_cmpeq_epi16((__m256i)a, (__m256i)b);
#endif
}

struct E4M3Floats {
  static constexpr bool kHasScales = false;
  static constexpr float kUnit = 256.0f;
  PC_FORCE_INLINE static void numbers(const char* codes, Vec (&to)[2]) {
    const auto words = (Words)load_signed(codes);
    widen_halves(nan_where_equal(words << 7 & 0xbfff, words & 0x7f, Words{} + 0x7f), to);
  }
};

// The bytes of `scales` are those of groups of 32.
struct ScaledE4M3Floats : E4M3Floats {
  static constexpr bool kHasScales = true;
};

struct E5M2Floats {
  static constexpr bool kHasScales = false;
  static constexpr float kUnit = 1.0f;
  PC_FORCE_INLINE static void numbers(const char* codes, Vec (&to)[2]) { widen_halves(load_high(codes), to); }
};

struct Int8Floats {
  static constexpr bool kHasScales = false;
  static constexpr float kUnit = 1.0f;
  PC_FORCE_INLINE static void numbers(const char* codes, Vec (&to)[2]) {
    const auto* const bytes = reinterpret_cast<const __m128i*>(codes);
#if defined(__AVX512F__)
    to[0] = to_floats((IntVec)_mm512_maskz_cvtepi8_epi32(kAllLanes, _mm_loadu_si128(bytes)));
    to[1] = to_floats((IntVec)_mm512_maskz_cvtepi8_epi32(kAllLanes, _mm_loadu_si128(bytes + 1)));
#else
    to[0] = to_floats((IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(bytes)));
    to[1] = to_floats((IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + kLanes))));
#endif
  }
};

// Numbers that are made at once.
constexpr int64_t kFloatStep = 2 * kLanes;

// The numbers d .. d + kFloatStep of the token t, divided by kUnit.
template <typename Codes>
PC_FORCE_INLINE void numbers_at(const StoredTile& tile, int t, int64_t d, Vec (&numbers)[2]) {
  Codes::numbers(tile.codes[t] + d, numbers);
  if constexpr (Codes::kHasScales) {
    const Vec scale = splat(tile.numbers[static_cast<uint8_t>(tile.scales[t][d / 32])]);
    numbers[0] = numbers[0] * scale;
    numbers[1] = numbers[1] * scale;
  }
}

// Keys that are multiplied together, and parts of their sums, so that additions do not wait for each other.
constexpr int kFloatKeys = kLanes == 16 ? kBlockTokens : 1, kFloatParts = kLanes == 16 ? 1 : 2;

// The lanes of the sums over the dims of some keys from the token t on, and R query rows.
template <typename Codes, int R>
PC_FORCE_INLINE void multiply_float_keys(const StoredTile& tile, int t, int64_t dim, const float* query, int64_t stride,
                                         Vec (&lanes)[kFloatKeys][R]) {
  Vec sums[kFloatKeys][R][kFloatParts] = {};
  for (int64_t d = 0; d < dim; d += kFloatStep) {
    Vec numbers[kFloatKeys][2];
#pragma GCC unroll 4
    for (int k = 0; k < kFloatKeys; ++k) numbers_at<Codes>(tile, t + k, d, numbers[k]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec q = load(query + r * stride + d + i * kLanes);
#pragma GCC unroll 4
        for (int k = 0; k < kFloatKeys; ++k) {
          Vec& part = sums[k][r][i % kFloatParts];
          part = fma(q, numbers[k][i], part);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < kFloatKeys; ++k) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      lanes[k][r] = kFloatParts == 1 ? sums[k][r][0] : sums[k][r][0] + sums[k][r][kFloatParts - 1];
    }
  }
}

// Scores [R, 64].
template <typename Codes, int R>
void score_floats_of(const StoredTile& tile, int64_t dim, const float* query, int64_t stride, const RowAhead& next,
                     float* scores) {
  const RowAhead ahead = next;
  for (int t = 0; t < kTileTokens; t += kBlockTokens) {
    Vec sums[R][kBlockTokens];
#pragma GCC unroll 4
    for (int first = 0; first < kBlockTokens; first += kFloatKeys) {
      Vec lanes[kFloatKeys][R];
#pragma GCC unroll 4
      for (int k = 0; k < kFloatKeys; ++k) ahead.prefetch_streams(t + first + k);
      multiply_float_keys<Codes, R>(tile, t + first, dim, query, stride, lanes);
#pragma GCC unroll 4
      for (int k = 0; k < kFloatKeys; ++k) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r][first + k] = lanes[k][r] * Codes::kUnit;
      }
    }
    store_sums<R>(sums, scores + t);
  }
}

// Steps whose sums are made together.
constexpr int kFloatSteps = kLanes == 16 ? 2 : 1;

// Adds the products of N steps of dims from d on for R rows.
template <typename Codes, int R, int N, bool kPrefetches>
void accumulate_floats_of(const HeadRows& rows, int64_t row, const StoredTile& tile, int64_t d, const PassAhead& next) {
  const PassAhead ahead = next;
  const float* const weights = rows.scores + row * kTileTokens;
  Vec sums[R][N][2] = {};
  for (int t = 0; t < kTileTokens; ++t) {
    if constexpr (kPrefetches) ahead.prefetch(t);
    Vec numbers[N][2];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) numbers_at<Codes>(tile, t, d + n * kFloatStep, numbers[n]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kTileTokens + t]);
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        sums[r][n][0] = fma(weight, numbers[n][0], sums[r][n][0]);
        sums[r][n][1] = fma(weight, numbers[n][1], sums[r][n][1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* const acc = rows.acc + (row + r) * rows.acc_stride + d;
#pragma GCC unroll 4
    for (int i = 0; i < 2 * N; ++i) {
      add_product(acc + i * kLanes, sums[r][i / 2][i % 2] * Codes::kUnit, rows.factor + row + r);
    }
  }
}

// Calls visit.operator()<Codes>() for the codes of a format.
template <typename Visit>
PC_FORCE_INLINE void with_floats(Format format, Visit&& visit) {
  switch (format) {
    case Format::I8Token: return visit.template operator()<Int8Floats>();
    case Format::E5M2: return visit.template operator()<E5M2Floats>();
    case Format::MXFP8: return visit.template operator()<ScaledE4M3Floats>();
    default: return visit.template operator()<E4M3Floats>();
  }
}

// True if the products of a format and dim are made here.
PC_FORCE_INLINE bool has_floats(const Cache& cache) {
  const bool known = cache.format == Format::E4M3 || cache.format == Format::E4M3Token ||
                     cache.format == Format::E5M2 || cache.format == Format::MXFP8 || cache.format == Format::I8Token;
  return known && cache.dim % kFloatStep == 0;
}

inline void score_floats(const HeadRows& rows, const Cache& cache, const StoredTile& tile, const NextRows& next_rows) {
  prefetch_all_scales(next_rows);
  with_floats(cache.format, [&]<typename Codes>() {
    for_each_even_block(rows.count, [&]<int R>(int64_t row) {
      const RowAhead ahead = row == 0 && next_rows.rows.base != nullptr ? RowAhead(next_rows) : RowAhead(tile);
      score_floats_of<Codes, R>(tile, cache.dim, rows.query + row * rows.query_stride, rows.query_stride, ahead,
                                rows.scores + row * kTileTokens);
    });
  });
}

// Adds the products of all rows, which attend to the same keys.
inline void accumulate_floats(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                              const NextRows& next_rows) {
  prefetch_all_scales(next_rows);
  const int64_t steps = cache.dim / kFloatStep;
  PassAhead ahead(next_rows, (steps + kFloatSteps - 1) / kFloatSteps);
  with_floats(cache.format, [&]<typename Codes>() {
    for_each_even_block(rows.count, [&]<int R>(int64_t row) {
      const auto add = [&]<int N>(int64_t step) {
        const int64_t d = step * kFloatStep;
        if (row == 0 && ahead.begin(step / kFloatSteps)) {
          accumulate_floats_of<Codes, R, N, true>(rows, row, tile, d, ahead);
        } else {
          accumulate_floats_of<Codes, R, N, false>(rows, row, tile, d, ahead);
        }
      };
      int64_t step = 0;
      for (; step + kFloatSteps <= steps; step += kFloatSteps) add.template operator()<kFloatSteps>(step);
      if (step < steps) add.template operator()<1>(step);
    });
  });
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
