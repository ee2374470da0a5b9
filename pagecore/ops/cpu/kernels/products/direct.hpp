// Scores and values of one tile and one head, with keys and values read in place.
#pragma once

#include "pagecore/ops/cpu/kernels/products/dot.hpp"
#include "pagecore/ops/cpu/kernels/products/values.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Scores whole blocks of tokens; softmax gives tokens that a row does not attend to weight 0. Only the first row block
// prefetches the next rows.
template <typename ScoreBlock>
PC_FORCE_INLINE void score_blocks(const HeadRows& rows, NextRows next_rows, ScoreBlock&& score_block) {
  for_each_row_block(rows.count, [&]<int R>(int64_t row) {
    const Span span = span_of(rows.low + row, rows.high + row, R);
    if (span.first >= span.last) return;
    const int last = (span.last + kBlockTokens - 1) & ~(kBlockTokens - 1);
    for (int token = span.first & ~(kBlockTokens - 1); token < last; token += kBlockTokens) {
      score_block.template operator()<R>(row, token, next_rows);
    }
    next_rows = {};
  });
}

template <Float K>
void score_rows(const HeadRows& rows, const TokenRows& keys, const NextRows& next_rows, int64_t dim) {
  score_blocks(rows, next_rows,
               [&]<int R>(int64_t row, int token, const NextRows& next) __attribute__((always_inline)) {
                 score_block<K, R>(rows.query + row * rows.query_stride, rows.query_stride, keys, next, token, dim,
                                   rows.scores + row * kTileTokens);
               });
}

// Every row attends to exactly the keys of `span`.
template <Float V>
void accumulate_rows(const HeadRows& rows, const TokenRows& values, NextRows next_rows, Span span, int64_t dim) {
  for_each_row_block(rows.count, [&]<int R>(int64_t row) {
    const RowSums sums{rows.scores + row * kTileTokens, rows.acc + row * rows.acc_stride, rows.acc_stride,
                       rows.factor + row};
    for_each_width<kWidest<R>, 1>(dim / kLanes, [&]<int N>(int64_t vector) __attribute__((always_inline)) {
      value_block<V, R, N>(sums, values, next_rows, span.first, span.last, vector);
    });
    next_rows = {};
  });
}

// Calls visit.template operator()<by pages>().
template <typename Visit>
PC_FORCE_INLINE void with_pages(const NextRows& next_rows, Visit&& visit) {
  if (kMayReadByPages && next_rows.by_pages) {
    visit.template operator()<kMayReadByPages>();
  } else {
    visit.template operator()<false>();
  }
}

// score_rows for pairs of bfloat16.
inline void score_pairs([[maybe_unused]] const HeadRows& rows, [[maybe_unused]] const TokenRows& keys,
                        [[maybe_unused]] const NextRows& next_rows, [[maybe_unused]] int64_t dim) {
#if defined(__AVX512BF16__)
  with_pages(next_rows, [&]<bool kByPages>() __attribute__((always_inline)) {
    score_blocks(rows, next_rows,
                 [&]<int R>(int64_t row, int token, const NextRows& next) __attribute__((always_inline)) {
                   dot_score_block<R, kByPages>(rows.query_pairs + row * rows.query_stride, rows.query_stride, keys,
                                                next, token, dim, rows.scores + row * kTileTokens);
                 });
  });
#endif
}

// accumulate_rows for pairs of bfloat16. A pair starts at an even index; if only one of its tokens is in `span`, the
// row `zeros` replaces the other.
inline void accumulate_pairs([[maybe_unused]] const HeadRows& rows, [[maybe_unused]] TokenRows values,
                             [[maybe_unused]] NextRows next_rows, [[maybe_unused]] Span span,
                             [[maybe_unused]] int64_t dim, [[maybe_unused]] const float* zeros) {
#if defined(__AVX512BF16__)
  int64_t offsets[kTileTokens];
  const Span pairs{span.first & ~1, (span.last + 1) & ~1};
  if (pairs.first != span.first || pairs.last != span.last) {
    __builtin_memcpy(offsets, values.offsets, sizeof offsets);
    const int64_t to_zeros = reinterpret_cast<const char*>(zeros) - values.base;
    if (pairs.first != span.first) offsets[pairs.first] = to_zeros;
    if (pairs.last != span.last) offsets[pairs.last - 1] = to_zeros;
    values.offsets = offsets;
  }
  for_each_row_block(rows.count, [&]<int R>(int64_t row) {
    const RowSums sums{nullptr, rows.acc + row * rows.acc_stride, rows.acc_stride, rows.factor + row};
    const uint16_t* weights = rows.weights + row * kTileTokens;
    for_each_width<kWidest<R>, 2>(dim / kLanes, [&]<int N>(int64_t vector) __attribute__((always_inline)) {
      with_pages(next_rows, [&]<bool kByPages>() __attribute__((always_inline)) {
        dot_value_block<R, N, kByPages>(sums, weights, values, next_rows, pairs.first, pairs.last, vector);
      });
    });
    next_rows = {};
  });
#endif
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
