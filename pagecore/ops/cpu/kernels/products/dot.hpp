// Scores and values of bfloat16 without widening, by AVX-512's dot product of pairs, with keys and values read in
// place.
//
//   scores   pairs along the dims: 32 numbers of a key times 32 numbers of a query row
//   values   pairs of tokens: two value rows are interleaved, and so are their weights, rounded to bfloat16
//
// The order of additions is the same for every block shape, as in scores.hpp and values.hpp.
#pragma once

#include "pagecore/ops/cpu/kernels/products/values.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512BF16__)

// bfloat16 numbers in a vector.
constexpr int kPairLanes = 2 * kLanes;

typedef uint16_t PairVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t LoosePairVec __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));

PC_FORCE_INLINE PairVec load_pairs(const void* p) { return *static_cast<const LoosePairVec*>(p); }

PC_FORCE_INLINE PairVec splat_pair(const void* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return (PairVec)(IntVec{} + pair);
}

// sum + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1]
PC_FORCE_INLINE Vec dot(PairVec a, PairVec b, Vec sum) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// {a0 b0 a1 b1 ...} of the first and of the last 16 numbers of a and b.
PC_FORCE_INLINE PairVec weave_low(PairVec a, PairVec b) {
  return __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11,
                                 43, 12, 44, 13, 45, 14, 46, 15, 47);
}
PC_FORCE_INLINE PairVec weave_high(PairVec a, PairVec b) {
  return __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57,
                                 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}

// Prefetches a line of the rows that are needed next: see kMayReadByPages.
template <bool kByPages>
PC_FORCE_INLINE void prefetch_next(const char* p) {
  if constexpr (kByPages) {
    prefetch_line_near(p);
  } else {
    prefetch_line(p);
  }
}

template <int R, bool kByPages>
PC_FORCE_INLINE void dot_score_block(const uint16_t* query, int64_t stride, const TokenRows& keys,
                                     const NextRows& next_rows, int token, int64_t dim, float* scores) {
  prefetch_elsewhere(next_rows, token, kBlockTokens);
  const char* key[kBlockTokens];
#pragma GCC unroll 4
  for (int t = 0; t < kBlockTokens; ++t) key[t] = keys.base + keys.offsets[token + t];
  Vec sums[R][kBlockTokens] = {};
  for (int64_t d = 0; d < dim; d += kPairLanes) {
    if (next_rows.distance != 0) {
#pragma GCC unroll 4
      for (int t = 0; t < kBlockTokens; ++t) {
        prefetch_next<kByPages>(key[t] + d * kSize<Float::BF16> + next_rows.distance);
      }
    }
    PairVec k[kBlockTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kBlockTokens; ++t) k[t] = load_pairs(key[t] + d * kSize<Float::BF16>);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const PairVec q = load_pairs(query + r * stride + d);
#pragma GCC unroll 4
      for (int t = 0; t < kBlockTokens; ++t) sums[r][t] = dot(q, k[t], sums[r][t]);
    }
  }
  store_sums<R>(sums, scores + token);
}

// Accumulates vectors first_vector .. first_vector + N of the rows' values; N is even.
template <int R, int N, bool kByPages>
PC_FORCE_INLINE void dot_value_block(const RowSums& rows, const uint16_t* weights, const TokenRows& values,
                                     const NextRows& next_rows, int first, int last, int64_t first_vector) {
  const int64_t byte = first_vector * kLanes * kSize<Float::BF16>;
  Vec sums[R][N] = {};
  for (int token = first; token < last; token += 2) {
    if (first_vector == 0) prefetch_elsewhere(next_rows, token, 2);
    const char* p = values.base + values.offsets[token] + byte;
    const char* q = values.base + values.offsets[token + 1] + byte;
    PairVec v[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n += 2) {
      const PairVec a = load_pairs(p + n * kLanes * kSize<Float::BF16>);
      const PairVec b = load_pairs(q + n * kLanes * kSize<Float::BF16>);
      if (next_rows.distance != 0) {
        prefetch_next<kByPages>(p + n * kLanes * kSize<Float::BF16> + next_rows.distance);
        prefetch_next<kByPages>(q + n * kLanes * kSize<Float::BF16> + next_rows.distance);
      }
      v[n] = weave_low(a, b);
      v[n + 1] = weave_high(a, b);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const PairVec w = splat_pair(weights + r * kTileTokens + token);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[r][n] = dot(v[n], w, sums[r][n]);
    }
  }
  add_sums<R, N>(rows, sums, first_vector);
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
