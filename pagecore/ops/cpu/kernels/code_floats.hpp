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

// Scores [R, 64].
template <typename Codes, int R>
void score_floats_of(const StoredTile& tile, int64_t dim, const float* query, int64_t stride, const RowAhead& next,
                     float* scores) {
  const RowAhead ahead = next;
  for (int t = 0; t < kTileTokens; t += kBlockTokens) {
    Vec sums[R][kBlockTokens];
#pragma GCC unroll 4
    for (int k = 0; k < kBlockTokens; ++k) {
      ahead.prefetch_streams(t + k);
      Vec parts[R][2] = {};
      for (int64_t d = 0; d < dim; d += kFloatStep) {
        Vec numbers[2];
        numbers_at<Codes>(tile, t + k, d, numbers);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          parts[r][0] = fma(load(query + r * stride + d), numbers[0], parts[r][0]);
          parts[r][1] = fma(load(query + r * stride + d + kLanes), numbers[1], parts[r][1]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r][k] = (parts[r][0] + parts[r][1]) * Codes::kUnit;
    }
    store_sums<R>(sums, scores + t);
  }
}

// Adds the products of dims d .. d + kFloatStep for R rows.
template <typename Codes, int R, bool kPrefetches>
void accumulate_floats_of(const HeadRows& rows, int64_t row, const StoredTile& tile, int64_t d, const PassAhead& next) {
  const PassAhead ahead = next;
  const float* const weights = rows.scores + row * kTileTokens;
  Vec sums[R][2] = {};
  for (int t = 0; t < kTileTokens; ++t) {
    if constexpr (kPrefetches) ahead.prefetch(t);
    Vec numbers[2];
    numbers_at<Codes>(tile, t, d, numbers);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kTileTokens + t]);
      sums[r][0] = fma(weight, numbers[0], sums[r][0]);
      sums[r][1] = fma(weight, numbers[1], sums[r][1]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* const acc = rows.acc + (row + r) * rows.acc_stride + d;
    add_product(acc, sums[r][0] * Codes::kUnit, rows.factor + row + r);
    add_product(acc + kLanes, sums[r][1] * Codes::kUnit, rows.factor + row + r);
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
  PassAhead ahead(next_rows, cache.dim / kFloatStep);
  with_floats(cache.format, [&]<typename Codes>() {
    for_each_even_block(rows.count, [&]<int R>(int64_t row) {
      for (int64_t d = 0; d < cache.dim; d += kFloatStep) {
        if (row == 0 && ahead.begin(d / kFloatStep)) {
          accumulate_floats_of<Codes, R, true>(rows, row, tile, d, ahead);
        } else {
          accumulate_floats_of<Codes, R, false>(rows, row, tile, d, ahead);
        }
      }
    });
  });
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
