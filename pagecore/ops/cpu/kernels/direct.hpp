// One tile and one head, keys and values where they lie in the cache.
#pragma once

#include "pagecore/ops/cpu/kernels/dot.hpp"
#include "pagecore/ops/cpu/kernels/values.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Only whole blocks of tokens are scored; what no row attends to gets no weight. The next rows are asked for once.
template <typename ScoreBlock>
PC_FORCE_INLINE void score_blocks(const HeadRows& rows, Ahead ahead, ScoreBlock&& score_block) {
  for_each_row_block(rows.count, [&]<int R>(int64_t row) {
    const Span span = span_of(rows.low + row, rows.high + row, R);
    if (span.first >= span.last) return;
    const int last = (span.last + kBlockTokens - 1) & ~(kBlockTokens - 1);
    for (int token = span.first & ~(kBlockTokens - 1); token < last; token += kBlockTokens) {
      score_block.template operator()<R>(row, token, ahead);
    }
    ahead = {};
  });
}

template <Float K>
void score_rows(const HeadRows& rows, const Tokens& keys, const Ahead& ahead, int64_t dim) {
  score_blocks(rows, ahead, [&]<int R>(int64_t row, int token, const Ahead& next) __attribute__((always_inline)) {
    score_block<K, R>(rows.query + row * rows.query_stride, rows.query_stride, keys, next, token, dim,
                      rows.scores + row * kTileTokens);
  });
}

// `span` holds the keys that every row attends to.
template <Float V>
void weigh_rows(const HeadRows& rows, const Tokens& values, Ahead ahead, Span span, int64_t dim) {
  for_each_row_block(rows.count, [&]<int R>(int64_t row) {
    const RowSums sums{rows.scores + row * kTileTokens, rows.acc + row * rows.acc_stride, rows.acc_stride,
                       rows.factor + row};
    for_each_width<kWidest<R>, 1>(dim / kLanes, [&]<int N>(int64_t vector) __attribute__((always_inline)) {
      value_block<V, R, N>(sums, values, ahead, span.first, span.last, vector);
    });
    ahead = {};
  });
}

// The same of bfloat16 in pairs.
inline void score_pairs([[maybe_unused]] const HeadRows& rows, [[maybe_unused]] const Tokens& keys,
                        [[maybe_unused]] const Ahead& ahead, [[maybe_unused]] int64_t dim) {
#if defined(__AVX512BF16__)
  score_blocks(rows, ahead, [&]<int R>(int64_t row, int token, const Ahead& next) __attribute__((always_inline)) {
    dot_score_block<R>(rows.query_pairs + row * rows.query_stride, rows.query_stride, keys, next, token, dim,
                       rows.scores + row * kTileTokens);
  });
#endif
}

// Pairs begin at even places: a token without a neighbour in the span gets `zeros`, a row of them.
inline void weigh_pairs([[maybe_unused]] const HeadRows& rows, [[maybe_unused]] Tokens values,
                        [[maybe_unused]] Ahead ahead, [[maybe_unused]] Span span, [[maybe_unused]] int64_t dim,
                        [[maybe_unused]] const float* zeros) {
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
      dot_value_block<R, N>(sums, weights, values, ahead, pairs.first, pairs.last, vector);
    });
    ahead = {};
  });
#endif
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
