// Scores of few query rows from float8 codes of keys, by products of pairs of bfloat16 (code_pairs.hpp).
//
//   four keys   for each chunk of 128 dims, or of the last 64
//                 lanes [key, row] += pairs of the key . pairs of the row
//               a lane has dims of one group, so that its sum is multiplied with the scale of that group
//   16 lanes    added for 16 sums at a time, by zips and additions that leave one sum in each lane
//
// Pairs of four keys are made in registers and multiplied at once, so that the loads, the lookups and the products of
// neighbouring keys overlap.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/code_pairs.hpp"
#include "pagecore/ops/cpu/kernels/codes/few_rows.hpp"
#include "pagecore/ops/cpu/kernels/codes/group_scales.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512BF16__) && !defined(PC_AMX)

// Keys that are multiplied together, so that their sums do not wait for each other.
constexpr int kPairKeys = 4;

// The codes of keys of a format of 8 bits, and the size of their groups; 0 without groups.
template <typename CodesOfFormat, int kSize>
struct KeyCodes {
  using Codes = CodesOfFormat;
  static constexpr int kGroup = kSize;
};

// Calls visit.operator()<KeyCodes>() for the codes of a format.
template <typename Visit>
PC_FORCE_INLINE void with_key_pairs(Format format, Visit&& visit) {
  switch (format) {
    case Format::E5M2: return visit.template operator()<KeyCodes<BytePairs<Float8Unpacker<E5M2Code>>, 0>>();
    case Format::MXFP8: return visit.template operator()<KeyCodes<BytePairs<Float8Unpacker<E4M3Code>, true>, 32>>();
    default: return visit.template operator()<KeyCodes<BytePairs<Float8Unpacker<E4M3Code>>, 0>>();
  }
}

// ---- queries

// Writes query rows in the order of the operands of keys, in the blocks of rows of score_pair_codes(). `given` is
// scratch for the rows of a block.
inline void order_pair_queries(const Cache& cache, uint16_t* rows, int64_t count, uint16_t* given) {
  with_key_pairs(cache.format, [&]<typename Keys>() {
    for_each_even_block(count, [&]<int R>(int64_t row) {
      order_queries<typename Keys::Codes>(rows + row * cache.dim, cache.dim, R, given);
    });
  });
}

// ---- products

// Adds the products of a chunk of the keys from `first` on. `query` is [kVectors, R, 32].
template <int kVectors, int R, typename Codes>
PC_FORCE_INLINE void multiply_pair_chunk(const Codes& codes, const StoredTile& tile, int first, int64_t d,
                                         const uint16_t* query, Vec (&sums)[kPairKeys][R]) {
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v += 2, query += 2 * R * kPairLanes) {
    PairVec pairs[kPairKeys][2];
#pragma GCC unroll 4
    for (int k = 0; k < kPairKeys; ++k) codes.template keys<kVectors>(tile, first + k, d, v, pairs[k]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const PairVec q = load_pairs(query + (i * R + r) * kPairLanes);
#pragma GCC unroll 4
        for (int k = 0; k < kPairKeys; ++k) sums[k][r] = dot(pairs[k][i], q, sums[k][r]);
      }
    }
  }
}

// The lanes of the scores of the keys from `first` on. `scales` are [64, groups].
template <typename Keys, int R>
PC_FORCE_INLINE void multiply_pair_keys(const typename Keys::Codes& codes, const StoredTile& tile, int first,
                                        int64_t dim, const uint16_t* query, const uint16_t* scales,
                                        Vec (&sums)[kPairKeys][R]) {
  const auto multiply = [&]<int kVectors>(int64_t d) __attribute__((always_inline)) {
    if constexpr (Keys::kGroup == 0) {
      multiply_pair_chunk<kVectors, R>(codes, tile, first, d, query + d * R, sums);
    } else {
      const LaneScales<kVectors * kPairLanes / Keys::kGroup> lanes;
      Vec of_chunk[kPairKeys][R] = {};
      multiply_pair_chunk<kVectors, R>(codes, tile, first, d, query + d * R, of_chunk);
#pragma GCC unroll 4
      for (int k = 0; k < kPairKeys; ++k) {
        const Vec scale = lanes.of(scales + ((first + k) * dim + d) / Keys::kGroup);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[k][r] = fma(of_chunk[k][r], scale, sums[k][r]);
      }
    }
  };
  int64_t d = 0;
  for (; d + 4 * kPairLanes <= dim; d += 4 * kPairLanes) multiply.template operator()<4>(d);
  if (d < dim) multiply.template operator()<2>(d);
}

// Scores [R, 64]. The dim is a constant if kDim is not 0.
template <typename Keys, int R, int64_t kDim>
void score_pairs_of(const StoredTile& tile, int64_t any_dim, const uint16_t* query, const uint16_t* scales,
                    const RowAhead& next, float* scores) {
  const RowAhead ahead = next;
  const int64_t dim = kDim == 0 ? any_dim : kDim;
  const typename Keys::Codes codes(tile);
  for (int t = 0; t < kTileTokens; t += kPairKeys) {
#pragma GCC unroll 4
    for (int k = 0; k < kPairKeys; ++k) ahead.prefetch_streams(t + k);
    Vec sums[kPairKeys][R] = {}, of_rows[R][kBlockTokens];
    multiply_pair_keys<Keys, R>(codes, tile, t, dim, query, scales, sums);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int k = 0; k < kPairKeys; ++k) of_rows[r][k] = sums[k][r];
    }
    store_sums<R>(of_rows, scores + t);
  }
}

// Scores of all rows, which order_pair_queries() has ordered.
inline void score_pair_codes(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                             const NextRows& next_rows, const Scratch& scratch) {
  constexpr int64_t kUsualDim = 128;
  auto* const scales = reinterpret_cast<uint16_t*>(scratch.key);
  const int64_t dim = cache.dim;
  prefetch_all_scales(next_rows);
  with_key_pairs(cache.format, [&]<typename Keys>() {
    if constexpr (Keys::kGroup != 0) convert_scales(cache, tile, scales);
    for_each_even_block(rows.count, [&]<int R>(int64_t row) {
      const uint16_t* const query = rows.query_pairs + row * rows.query_stride;
      float* const scores = rows.scores + row * kTileTokens;
      const RowAhead ahead = row == 0 ? rows_ahead(next_rows, tile) : RowAhead(tile);
      auto* const score = dim == kUsualDim ? score_pairs_of<Keys, R, kUsualDim> : score_pairs_of<Keys, R, 0>;
      score(tile, dim, query, scales, ahead, scores);
    });
  });
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
