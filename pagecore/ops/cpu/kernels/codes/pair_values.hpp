// Weights of few query rows times values from their float8 codes, by products of pairs of bfloat16 (code_pairs.hpp).
//
// A vector of sums has the dims of one group. The scales of groups are multiplied with the weights, which is fewer
// products than with the numbers.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/group_weights.hpp"
#include "pagecore/ops/cpu/kernels/codes/pair_scores.hpp"
#include "pagecore/ops/cpu/kernels/products/multiply.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512BF16__) && !defined(PC_AMX)

// Query rows that are multiplied together.
constexpr int kPairRows = 4;

// Adds the products of 64 dims from d on. The weights [groups, kPairRows, 64] of vector n of the sums are those of the
// group n / kShared.
template <typename Codes, int kShared, int R, bool kPrefetches>
PC_FORCE_INLINE void add_pair_values(const Codes& codes, const HeadRows& rows, int64_t row, const uint16_t* weights,
                                     const StoredTile& tile, const PassAhead& next, int64_t d) {
  const PassAhead ahead = next;
  Vec sums[R][kValueVectors] = {};
  for (int t = 0; t < kTileTokens; t += 2) {
    if constexpr (kPrefetches) ahead.prefetch(t);
    PairVec pairs[kValueVectors];
    codes.values(tile, t, d, pairs);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < kValueVectors; ++n) {
        const PairVec weight = splat_pair(weights + (n / kShared * kPairRows + r) * kTileTokens + t);
        sums[r][n] = dot(pairs[n], weight, sums[r][n]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* const acc = rows.acc + (row + r) * rows.acc_stride + d;
#pragma GCC unroll 4
    for (int n = 0; n < kValueVectors; ++n) add_product(acc + n * kLanes, sums[r][n], rows.factor + row + r);
  }
}

// Adds the products of all rows.
template <typename Codes, int kGroup>
void add_all_pair_values(const HeadRows& rows, const StoredTile& tile, const NextRows& next_rows,
                         const GroupScales& scales, int64_t dim) {
  constexpr int kGroups = kGroup == 0 ? 1 : kValueDims / kGroup, kShared = kValueVectors / kGroups;
  const Codes codes(tile);
  PassAhead ahead(next_rows, dim / kValueDims);
  [[maybe_unused]] alignas(64) uint16_t scaled[kGroups * kPairRows * kTileTokens];
  for_each_even_block(rows.count, [&]<int R>(int64_t row) {
    const uint16_t* const pairs = rows.weights + row * kTileTokens;
    for (int64_t d = 0; d < dim; d += kValueDims) {
      const uint16_t* weights = pairs;
      if constexpr (kGroup != 0) {
        for (int g = 0; g < kGroups; ++g) {
          scales.scale(d / kGroup + g, rows.scores + row * kTileTokens, pairs, R, scaled + g * kPairRows * kTileTokens);
        }
        weights = scaled;
      }
      if (row == 0 && ahead.begin(d / kValueDims)) {
        add_pair_values<Codes, kShared, R, true>(codes, rows, row, weights, tile, ahead, d);
      } else {
        add_pair_values<Codes, kShared, R, false>(codes, rows, row, weights, tile, ahead, d);
      }
    }
  });
}

// Adds the products of all rows, which attend to the same keys.
inline void accumulate_pair_codes(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                                  const NextRows& next_rows, const Scratch& scratch) {
  prefetch_all_scales(next_rows);
  const GroupScales scales(cache, tile, scratch.value);
  const auto add = [&]<typename Codes, int kGroup>() {
    add_all_pair_values<Codes, kGroup>(rows, tile, next_rows, scales, cache.dim);
  };
  using E4M3Pairs = BytePairs<Float8Unpacker<E4M3Code>>;
  switch (cache.format) {
    case Format::E5M2: return add.template operator()<BytePairs<Float8Unpacker<E5M2Code>>, 0>();
    case Format::MXFP8: return add.template operator()<E4M3Pairs, 32>();
    default: return add.template operator()<E4M3Pairs, 0>();
  }
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
