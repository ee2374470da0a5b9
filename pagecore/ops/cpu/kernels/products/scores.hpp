// Scores of one tile: query rows times keys that are read in place.
//
// A register block holds kBlockRows rows x 4 keys. Each sum runs over the dims in one vector accumulator, then over the
// lanes in the order of sum(). The order is the same for every block shape, so a row's bits do not depend on its
// neighbours.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/cpu/kernels/tiles/prefetch.hpp"
#include "pagecore/ops/cpu/kernels/tiles/tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Reduces the sums of R rows x 4 tokens and stores them in scores [R, 64].
template <int R>
PC_FORCE_INLINE void store_sums(const Vec (&sums)[R][kBlockTokens], float* scores) {
  if constexpr (R % kBlockRows == 0) {
    typedef Vec Block[kBlockRows][kBlockTokens];
#pragma GCC unroll 2
    for (int r = 0; r < R; r += kBlockRows) {
      sum_block(*reinterpret_cast<const Block*>(sums + r), scores + r * kTileTokens, kTileTokens);
    }
  } else {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      store_four(scores + r * kTileTokens, sum_each(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
    }
  }
}

template <Float K, int R>
PC_FORCE_INLINE void score_block(const float* query, int64_t stride, const TokenRows& keys, const NextRows& next_rows,
                                 int token, int64_t dim, float* scores) {
  prefetch_elsewhere(next_rows, token, kBlockTokens);
  const char* key[kBlockTokens];
#pragma GCC unroll 4
  for (int t = 0; t < kBlockTokens; ++t) key[t] = keys.base + keys.offsets[token + t];
  Vec sums[R][kBlockTokens] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    if (d * kSize<K> % kLine == 0 && next_rows.distance != 0) {
#pragma GCC unroll 4
      for (int t = 0; t < kBlockTokens; ++t) prefetch_line(key[t] + d * kSize<K> + next_rows.distance);
    }
    Vec k[kBlockTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kBlockTokens; ++t) k[t] = load_as_float<K>(key[t] + d * kSize<K>);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec q = load(query + r * stride + d);
#pragma GCC unroll 4
      for (int t = 0; t < kBlockTokens; ++t) sums[r][t] = fma(q, k[t], sums[r][t]);
    }
  }
  store_sums<R>(sums, scores + token);
}

// A range of keys of a tile.
struct Span {
  int first;
  int last;
};

// The range of keys that any of `count` rows attends to.
PC_FORCE_INLINE Span span_of(const int32_t* low, const int32_t* high, int64_t count) {
  Span span{static_cast<int>(kTileTokens), 0};
  for (int64_t r = 0; r < count; ++r) {
    if (low[r] >= high[r]) continue;
    span.first = low[r] < span.first ? low[r] : span.first;
    span.last = high[r] > span.last ? high[r] : span.last;
  }
  return span;
}

// Calls visit.template operator()<R>(row) for each block of R rows.
template <typename Visit>
PC_FORCE_INLINE void for_each_row_block(int64_t rows, Visit&& visit) {
  int64_t row = 0;
  for (; row + kBlockRows <= rows; row += kBlockRows) visit.template operator()<kBlockRows>(row);
  switch (rows - row) {
    case 1: visit.template operator()<1>(row); break;
    case 2:
      if constexpr (kBlockRows > 2) visit.template operator()<2>(row);
      break;
    case 3:
      if constexpr (kBlockRows > 3) visit.template operator()<3>(row);
      break;
    default: break;
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
