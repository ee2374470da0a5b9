// Weights of few query rows times values, straight from the codes: see code_scores.hpp.
//
// The scales of groups of 32 are multiplied with the float32 weights before these are rounded to bfloat16, which is
// fewer products than with the numbers: a vector of sums has the dims of one group. Those of groups of 16 are part of
// the tables that give the numbers.
#pragma once

#include "pagecore/ops/cpu/kernels/code_scores.hpp"
#include "pagecore/ops/cpu/kernels/multiply.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512VBMI__)

constexpr int kValueVectors = 4;

// Weights [kGroups, kRows, 64] times the scales of each group, as bfloat16.
template <int kGroups, int kRows>
PC_FORCE_INLINE void scale_weights_of_groups(const float* weights, int64_t rows, const float* scales,
                                             uint16_t* scaled) {
  for (int g = 0; g < kGroups; ++g) {
    Vec of_tokens[kTileTokens / kLanes];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) of_tokens[i] = load(scales + g * kTileTokens + i * kLanes);
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = weights + r * kTileTokens;
      uint16_t* to = scaled + (g * kRows + r) * kTileTokens;
#pragma GCC unroll 2
      for (int i = 0; i < 4; i += 2) {
        const Vec a = load(row + i * kLanes) * of_tokens[i], b = load(row + (i + 1) * kLanes) * of_tokens[i + 1];
        store_words(to + i * kLanes, (Words)_mm512_maskz_cvtne2ps_pbh(~__mmask32{0}, (__m512)b, (__m512)a));
      }
    }
  }
}

// Adds the products of 64 dims from d on. The weights of vector n of the sums are those of the group n / kShared.
template <typename Codes, int kShared, int R, bool kPrefetches>
PC_FORCE_INLINE void accumulate_block(const Codes& codes, const HeadRows& rows, int64_t row, const uint16_t* weights,
                                      const float* excess, const StoredTile& tile, const RowAhead& ahead, int64_t d) {
  Vec sums[R][kValueVectors] = {};
  for (int t = 0; t < kTileTokens; t += 2) {
    if constexpr (kPrefetches) {
      ahead.prefetch_streams_near(t);
      ahead.prefetch_streams_near(t + 1);
    }
    PairVec pairs[kValueVectors];
    codes.values(tile, t, d, pairs);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < kValueVectors; ++n) {
        const PairVec w = splat_pair(weights + (n / kShared * kBlockRows + r) * kTileTokens + t);
        sums[r][n] = dot(pairs[n], w, sums[r][n]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* out = rows.acc + (row + r) * rows.acc_stride + d;
    Codes::order(sums[r]);
#pragma GCC unroll 4
    for (int n = 0; n < kValueVectors; ++n) {
      add_product(out + n * kLanes, sums[r][n] - excess[row + r], rows.factor + row + r);
    }
  }
}

template <typename Codes, int kGroup>
void accumulate_codes_of(const HeadRows& rows, const StoredTile& tile, const NextRows& next_rows, const float* scales,
                         int64_t dim) {
  constexpr int kGroups = kGroup == 0 ? 1 : kValueDims / kGroup, kShared = kValueVectors / kGroups;
  const Codes codes(tile);
  const RowAhead ahead(next_rows);
  alignas(64) uint16_t scaled[kGroups * kBlockRows * kTileTokens];
  float excess[kCodeRows];
  for (int64_t r = 0; r < rows.count; ++r) excess[r] = codes.excess(rows.weights + r * kTileTokens);
  for (int64_t d = 0; d < dim; d += kValueDims) {
    for_each_row_block(rows.count, [&]<int R>(int64_t row) __attribute__((always_inline)) {
      const uint16_t* weights = rows.weights + row * kTileTokens;
      if constexpr (kGroup != 0) {
        scale_weights_of_groups<kGroups, kBlockRows>(rows.scores + row * kTileTokens, R, scales + d / kGroup * kTileTokens, scaled);
        weights = scaled;
      }
      if (d == 0 && row == 0 && next_rows.rows.base != nullptr) {
        accumulate_block<Codes, kShared, R, true>(codes, rows, row, weights, excess, tile, ahead, d);
      } else {
        accumulate_block<Codes, kShared, R, false>(codes, rows, row, weights, excess, tile, ahead, d);
      }
    });
  }
}

// Adds the products of all rows; all attend to the same keys.
inline void accumulate_codes(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                             const NextRows& next_rows, const Scratch& scratch) {
  float* scales = scratch.value;
  const int64_t dim = cache.dim;
  prefetch_all_scales(next_rows);
  if (group_size(cache.format) != 0) expand_scales(cache, tile, scales);
  switch (cache.format) {
    case Format::Plain: break;
    case Format::E4M3:
    case Format::E4M3Token:
      return accumulate_codes_of<BytePairs<Float8Unpacker<E4M3Code>>, 0>(rows, tile, next_rows, scales, dim);
    case Format::E5M2:
      return accumulate_codes_of<BytePairs<Float8Unpacker<E5M2Code>>, 0>(rows, tile, next_rows, scales, dim);
    case Format::MXFP8:
      return accumulate_codes_of<BytePairs<Float8Unpacker<E4M3Code>>, 32>(rows, tile, next_rows, scales, dim);
    case Format::I8Token: return accumulate_codes_of<BytePairs<Int8Unpacker>, 0>(rows, tile, next_rows, scales, dim);
    case Format::I4Token: return accumulate_codes_of<NibblePairs<Int4Codes>, 0>(rows, tile, next_rows, scales, dim);
    case Format::FP4Block16:
    case Format::NVFP4: return accumulate_codes_of<NibblePairs<E2M1Codes>, 16>(rows, tile, next_rows, scales, dim);
  }
}

#else

inline void accumulate_codes(const HeadRows&, const Cache&, const StoredTile&, const NextRows&, const Scratch&) {
  __builtin_trap();
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
