// Scores and sums of few query rows from codes of 8 bits, by products of float32 (code_floats.hpp).
//
// A query row has the order of the numbers. Sums over values are put in that of the dims.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/code_floats.hpp"
#include "pagecore/ops/cpu/kernels/codes/few_rows.hpp"
#include "pagecore/ops/cpu/kernels/products/multiply.hpp"
#include "pagecore/ops/cpu/kernels/products/scores.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

// ---- scores

// Puts a query row in the order of the numbers, whole steps of them; the row has `stride` numbers.
template <typename Codes>
inline void order_floats(float* row, int64_t dim, int64_t stride) {
  for (int64_t d = 0; d < stride; d += kByteLanes) {
    float given[kByteLanes];
    for (int i = 0; i < kByteLanes; ++i) given[i] = d + i < dim ? row[d + i] : 0.0f;
    for (int i = 0; i < kByteLanes; ++i) row[d + i] = given[Codes::dim_of(i / kLanes, i % kLanes)];
  }
}

// The scores of keys with a NaN of e4m3 become NaN.
[[gnu::noinline]] inline void replace_nan_scores(const StoredTile& tile, int64_t dim, int64_t count, float* scores) {
  for (int t = 0; t < kTileTokens; ++t) {
    NanCodes nans;
    for (int64_t d = 0; d < dim; d += kByteLanes) nans.add(load_row(tile.codes[t] + d, dim - d));
    if (!nans.any()) continue;
    for (int64_t r = 0; r < count; ++r) scores[r * kTileTokens + t] = __builtin_nanf("");
  }
}

// Keys that are multiplied together with R rows, so that their sums do not wait for each other.
template <int R>
constexpr int kFloatKeys = kBlockTokens / (R <= (kLanes == 8 ? 2 : 4) ? 1 : 2);

// The lanes of the sums over the dims of some keys from the token t on, and R query rows.
template <typename Codes, int R>
PC_FORCE_INLINE void multiply_float_keys(const Codes& codes, const StoredTile& tile, int t, int64_t dim,
                                         const float* query, int64_t stride, NanCodes& nans,
                                         Vec (&sums)[kFloatKeys<R>][R]) {
  const auto multiply = [&]<int kPart>(int64_t d) __attribute__((always_inline)) {
    const float* const from = query + d + kPart * kPartVectors * kLanes;
#if defined(__AVX512F__)
#pragma GCC unroll 4
    for (int k = 0; k < kFloatKeys<R>; ++k) {
      Vec numbers[kPartVectors];
      numbers_at<kPart>(codes, tile, t + k, d, dim, nans, numbers);
#pragma GCC unroll 4
      for (int v = 0; v < kPartVectors; ++v) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[k][r] = fma(load(from + r * stride + v * kLanes), numbers[v], sums[k][r]);
      }
    }
#else
    Vec numbers[kFloatKeys<R>][kPartVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kFloatKeys<R>; ++k) numbers_at<kPart>(codes, tile, t + k, d, dim, nans, numbers[k]);
#pragma GCC unroll 4
    for (int v = 0; v < kPartVectors; ++v) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec q = in_register(load(from + r * stride + v * kLanes));
#pragma GCC unroll 4
        for (int k = 0; k < kFloatKeys<R>; ++k) sums[k][r] = fma(q, numbers[k][v], sums[k][r]);
      }
    }
#endif
  };
  for (int64_t d = 0; d < dim; d += kByteLanes) {
    multiply.template operator()<0>(d);
    if constexpr (kStepParts == 2) multiply.template operator()<1>(d);
  }
}

// Scores [R, 64].
template <typename Codes, int R>
void score_floats_of(const StoredTile& tile, int64_t dim, const float* query, int64_t stride, const RowAhead& next,
                     float* scores) {
  const RowAhead ahead = next;
  const Codes codes;
  NanCodes nans;
  for (int t = 0; t < kTileTokens; t += kBlockTokens) {
    Vec sums[R][kBlockTokens];
#pragma GCC unroll 4
    for (int first = 0; first < kBlockTokens; first += kFloatKeys<R>) {
      Vec lanes[kFloatKeys<R>][R] = {};
#pragma GCC unroll 4
      for (int k = 0; k < kFloatKeys<R>; ++k) ahead.prefetch_streams(t + first + k);
      multiply_float_keys(codes, tile, t + first, dim, query, stride, nans, lanes);
#pragma GCC unroll 4
      for (int k = 0; k < kFloatKeys<R>; ++k) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][first + k] = lanes[k][r] * Codes::kUnit;
      }
    }
    store_sums<R>(sums, scores + t);
  }
  if (nans.any()) [[unlikely]]
    replace_nan_scores(tile, dim, R, scores);
}

// ---- sums over values

// Four vectors of sums in the order of the dims.
template <typename Codes>
PC_FORCE_INLINE void in_order(Vec (&v)[kStepVectors]) {
  if constexpr (Codes::dim_of(0, 1) == 1) return;
#if defined(__AVX512VBMI__)
  if constexpr (!Codes::kOfHalves) {
    return transpose_quarters(zip_low(v[0], v[1]), zip_high(v[0], v[1]), zip_low(v[2], v[3]), zip_high(v[2], v[3]), v);
  }
#endif
  const Vec low[2] = {zip_low(v[0], v[2]), zip_low(v[1], v[3])}, high[2] = {zip_high(v[0], v[2]), zip_high(v[1], v[3])};
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
#if defined(__AVX512F__)
    v[2 * h] = __builtin_shufflevector(low[h], high[h], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    v[2 * h + 1] =
        __builtin_shufflevector(low[h], high[h], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#else
    v[2 * h] = __builtin_shufflevector(low[h], high[h], 0, 1, 2, 3, 8, 9, 10, 11);
    v[2 * h + 1] = __builtin_shufflevector(low[h], high[h], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
  }
}

// The sums over values with a NaN of e4m3 become NaN: those of a step of dims from d on.
[[gnu::noinline]] inline void replace_nan_sums(const NanCodes& nans, const HeadRows& rows, int64_t row, int64_t count,
                                               int64_t d, int64_t dim) {
  const Bytes found = nans.places();
  for (int i = 0; i < kByteLanes && d + i < dim; ++i) {
    if (found[i] == 0) continue;
    for (int64_t r = row; r < row + count; ++r) rows.acc[r * rows.acc_stride + d + i] = __builtin_nanf("");
  }
}

// Sums over a tile of a part of a step of dims from d on, for R rows.
template <int kPart, typename Codes, int R, bool kPrefetches>
PC_FORCE_INLINE void multiply_float_values(const Codes& codes, const StoredTile& tile, int64_t d, int64_t dim,
                                           const float* weights, const PassAhead& next, NanCodes& nans,
                                           Vec (&out)[R][kStepVectors]) {
  const PassAhead ahead = next;
  Vec sums[R][kPartVectors] = {};
  for (int t = 0; t < kTileTokens; ++t) {
    if constexpr (kPrefetches) ahead.prefetch(t);
    Vec numbers[kPartVectors];
    numbers_at<kPart>(codes, tile, t, d, dim, nans, numbers);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kTileTokens + t]);
#pragma GCC unroll 4
      for (int v = 0; v < kPartVectors; ++v) sums[r][v] = fma(weight, numbers[v], sums[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kPartVectors; ++v) out[r][kPart * kPartVectors + v] = sums[r][v] * Codes::kUnit;
  }
}

// Adds the products of a step of dims from d on for R rows.
template <typename Codes, int R, bool kPrefetches>
void accumulate_floats_of(const HeadRows& rows, int64_t row, const StoredTile& tile, int64_t d, int64_t dim,
                          PassAhead ahead, int64_t pass) {
  const Codes codes;
  const float* const weights = rows.scores + row * kTileTokens;
  NanCodes nans;
  Vec sums[R][kStepVectors];
  multiply_float_values<0, Codes, R, kPrefetches>(codes, tile, d, dim, weights, ahead, nans, sums);
  if constexpr (kStepParts == 2) {
    ahead.begin(pass + 1);
    multiply_float_values<1, Codes, R, kPrefetches>(codes, tile, d, dim, weights, ahead, nans, sums);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* const acc = rows.acc + (row + r) * rows.acc_stride + d;
    in_order<Codes>(sums[r]);
#pragma GCC unroll 4
    for (int v = 0; v < kStepVectors; ++v) {
      if (d + v * kLanes >= dim) break;
      add_product(acc + v * kLanes, sums[r][v], rows.factor + row + r);
    }
  }
  if (nans.any()) [[unlikely]]
    replace_nan_sums(nans, rows, row, R, d, dim);
}

// Puts queries in the order of score_floats().
inline void order_floats(const Cache& cache, float* rows, int64_t stride, int64_t count) {
  with_floats(cache.format, [&]<typename Codes>() {
    for (int64_t r = 0; r < count; ++r) order_floats<Codes>(rows + r * stride, cache.dim, stride);
  });
}

inline void score_floats(const HeadRows& rows, const Cache& cache, const StoredTile& tile, const NextRows& next_rows) {
  prefetch_all_scales(next_rows);
  with_floats(cache.format, [&]<typename Codes>() {
    for_each_even_block<kMostBlockRows>(rows.count, [&]<int R>(int64_t row) {
      const RowAhead ahead = row == 0 ? rows_ahead(next_rows, tile) : RowAhead(tile);
      score_floats_of<Codes, R>(tile, cache.dim, rows.query + row * rows.query_stride, rows.query_stride, ahead,
                                rows.scores + row * kTileTokens);
    });
  });
}

// Adds the products of all rows, which attend to the same keys.
inline void accumulate_floats(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                              const NextRows& next_rows) {
  prefetch_all_scales(next_rows);
  const int64_t dim = cache.dim;
  PassAhead ahead(next_rows, (dim + kByteLanes - 1) / kByteLanes * kStepParts);
  with_floats(cache.format, [&]<typename Codes>() {
    for_each_even_block(rows.count, [&]<int R>(int64_t row) {
      int64_t pass = 0;
      for (int64_t d = 0; d < dim; d += kByteLanes, pass += kStepParts) {
        if (row == 0 && ahead.begin(pass)) {
          accumulate_floats_of<Codes, R, true>(rows, row, tile, d, dim, ahead, pass);
        } else {
          accumulate_floats_of<Codes, R, false>(rows, row, tile, d, dim, ahead, pass);
        }
      }
    });
  });
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
