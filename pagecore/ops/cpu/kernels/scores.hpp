// Scores: query rows times the keys of one tile.
//
// A register block holds kBlockRows rows x 4 keys; each of its sums runs over the dims in one vector accumulator, then
// over the lanes in the order of sum(). That order is the same in every shape of block, so a row's bits do not depend
// on its neighbours.
#pragma once

#include "pagecore/ops/cpu/kernels/convert.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Where the tokens of a tile lie: base + offsets[token].
struct Tokens {
  const char* base;
  const int64_t* offsets;
};

// The tile that comes next, to be fetched meanwhile.
struct Ahead {
  Tokens tokens;
  int64_t row_bytes;  // 0: nothing to fetch
};

PC_FORCE_INLINE void prefetch(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

template <Float K, int R>
PC_FORCE_INLINE void score_block(const float* query, int64_t stride, const Tokens& keys, int token, int64_t dim,
                                 float* scores) {
  const char* key[kBlockTokens];
#pragma GCC unroll 4
  for (int t = 0; t < kBlockTokens; ++t) key[t] = keys.base + keys.offsets[token + t];
  Vec sums[R][kBlockTokens] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
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
  if constexpr (R == kBlockRows) {
    sum_block(sums, scores + token, kTileTokens);
  } else {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      store_four(scores + r * kTileTokens + token, sum_each(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
    }
  }
}

// Tokens first .. last, both multiples of 4.
template <Float K, int R>
void score_rows(const float* query, int64_t stride, const Tokens& keys, const Ahead& ahead, int first, int last,
                int64_t dim, float* scores) {
  for (int token = first; token < last; token += kBlockTokens) {
    if (ahead.row_bytes != 0) {
#pragma GCC unroll 4
      for (int t = 0; t < kBlockTokens; ++t) {
        prefetch(ahead.tokens.base + ahead.tokens.offsets[token + t], ahead.row_bytes);
      }
    }
    score_block<K, R>(query, stride, keys, token, dim, scores);
  }
}

// The range of keys that any of `count` rows attends to.
struct Span {
  int first;
  int last;
};

PC_FORCE_INLINE Span span_of(const int32_t* low, const int32_t* high, int64_t count) {
  Span span{static_cast<int>(kTileTokens), 0};
  for (int64_t r = 0; r < count; ++r) {
    if (low[r] >= high[r]) continue;
    span.first = low[r] < span.first ? low[r] : span.first;
    span.last = high[r] > span.last ? high[r] : span.last;
  }
  return span;
}

// visit.template operator()<R>(row) for blocks of R rows.
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

template <Float K>
void score_tile(const float* query, int64_t stride, int64_t rows, const Tokens& keys, Ahead ahead, int64_t dim,
                const Scratch& scratch) {
  for_each_row_block(rows, [&]<int R>(int64_t row) {
    const Span span = span_of(scratch.low + row, scratch.high + row, R);
    if (span.first < span.last) {
      score_rows<K, R>(query + row * stride, stride, keys, ahead, span.first & ~(kBlockTokens - 1),
                       (span.last + kBlockTokens - 1) & ~(kBlockTokens - 1), dim, scratch.scores + row * kTileTokens);
      ahead.row_bytes = 0;  // once is enough
    }
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
