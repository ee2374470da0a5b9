// Weights of few query rows times values from their codes, by exact products of integers.
//
// The values of two tokens are multiplied and added at once, and a tile is added in int32:
//
//   stored bytes   t      a0 a1 a2 ..     words of both in turn   a0 a1 b0 b1 a2 a3 b2 b3 ..
//                  t + 1  b0 b1 b2 ..     even, odd bytes         a0 b0 a2 b2 ..    a1 b1 a3 b3 ..
//
// With groups, which have their own weights, a vector has the dims of one.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/integer_weights.hpp"
#include "pagecore/ops/cpu/kernels/products/multiply.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

// Pairs of operands whose sums are made together for R rows: those of the two halves of words of int8, or of the two
// parts of a half of words of 4-bit codes.
template <int R>
constexpr int kOperandPairs = kLanes == 16 && R <= 4 ? 2 : 1;

template <typename Codes, int kHalf, int kPair>
PC_FORCE_INLINE void operand_pair(const Codes& codes, Bytes a, Bytes b, Shorts (&to)[2]) {
  constexpr bool kOfBytes = Codes::kParts == 1;
  codes.template words<kOfBytes ? 0 : kPair>(zip_words<kOfBytes ? kPair : kHalf>(a, b), to);
}

// Sums over a tile of kOperandPairs<R> pairs of operands from kFrom on, for R rows. `words` are the weights of the
// first row.
template <typename Codes, int kHalf, int kFrom, int R, bool kPrefetches>
PC_FORCE_INLINE void multiply_values(const StoredTile& tile, int64_t at, int64_t bytes, const int16_t* words,
                                     const PassAhead& next, Vec (&out)[R][4]) {
  const PassAhead ahead = next;
  const Codes codes;
  IntVec sums[R][2 * kOperandPairs<R>] = {};
  for (int t = 0; t < kTileTokens; t += 2) {
    if constexpr (kPrefetches) ahead.prefetch(t);
    const Bytes a = load_stored(tile.codes[t] + at, bytes - at), b = load_stored(tile.codes[t + 1] + at, bytes - at);
    Shorts pairs[kOperandPairs<R>][2];
    operand_pair<Codes, kHalf, kFrom>(codes, a, b, pairs[0]);
    if constexpr (kOperandPairs<R> == 2) operand_pair<Codes, kHalf, 1>(codes, a, b, pairs[1]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Shorts weight = repeat_pair(words + r * kTileTokens + t);
#pragma GCC unroll 4
      for (int i = 0; i < 2 * kOperandPairs<R>; ++i) sums[r][i] = add_pairs(sums[r][i], pairs[i / 2][i % 2], weight);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < 2 * kOperandPairs<R>; ++i) out[r][2 * kFrom + i] = to_floats(sums[r][i]);
  }
}

// Four vectors of sums in the order of the dims, 16 in each quarter of the tile's codes.
template <typename Codes>
PC_FORCE_INLINE void order_sums(Vec (&v)[4]) {
  Vec p[4];
  if constexpr (Codes::kParts == 1) {
    p[0] = zip_low(v[0], v[1]), p[1] = zip_high(v[0], v[1]), p[2] = zip_low(v[2], v[3]), p[3] = zip_high(v[2], v[3]);
  } else {
    const Vec a = zip_low(v[0], v[1]), b = zip_low(v[2], v[3]), c = zip_high(v[0], v[1]), d = zip_high(v[2], v[3]);
    p[0] = zip_low(a, b), p[1] = zip_high(a, b), p[2] = zip_low(c, d), p[3] = zip_high(c, d);
  }
#if defined(__AVX512F__)
  transpose_quarters(p[0], p[1], p[2], p[3], v);
#else
  v[0] = even_quarters(p[0], p[1]), v[1] = even_quarters(p[2], p[3]);
  v[2] = odd_quarters(p[0], p[1]), v[3] = odd_quarters(p[2], p[3]);
#endif
}

// Adds the sums of R rows over the dims of a vector of stored bytes; those of 4-bit codes in two halves.
template <typename Codes, int kHalf, int R, bool kPrefetches>
void add_values(const HeadRows& rows, int64_t row, const Cache& cache, const StoredTile& tile, int64_t at,
                const IntegerWeights& weights, PassAhead ahead, int64_t pass) {
  constexpr int64_t kRun = 16 * Codes::kParts;  // dims from one quarter to the next
  const int64_t bytes = row_bytes(cache), first = at * Codes::kParts + 16 * kHalf;
  const int16_t* const words = words_of(weights, 0, row);
  Vec sums[R][4];
  multiply_values<Codes, kHalf, 0, R, kPrefetches>(tile, at, bytes, words, ahead, sums);
  if constexpr (kOperandPairs<R> == 1) {
    ahead.begin(pass + 1);
    multiply_values<Codes, kHalf, 1, R, kPrefetches>(tile, at, bytes, words, ahead, sums);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float* const acc = rows.acc + (row + r) * rows.acc_stride;
    order_sums<Codes>(sums[r]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t d = first + i * kLanes / 16 * kRun + i * kLanes % 16;
      if (d >= cache.dim) break;
      add_product(acc + d, (sums[r][i] - weights.excess[row + r]) * weights.units[row + r], rows.factor + row + r);
    }
  }
}

// Adds the products of all rows.
template <typename Codes>
inline void add_all_values(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                           const IntegerWeights& weights, const NextRows& next_rows) {
  const int64_t bytes = row_bytes(cache);
  const int64_t passes = Codes::kParts * ((bytes + kByteLanes - 1) / kByteLanes);
  PassAhead ahead(next_rows, rows.count < kMostBlockRows ? passes * 2 / kOperandPairs<4> : 2 * passes);
  for_each_even_block<kMostBlockRows>(rows.count, [&]<int R>(int64_t row) {
    constexpr int kPasses = 2 / kOperandPairs<R>;
    int64_t pass = 0;
    const auto add = [&]<int kHalf>(int64_t at) {
      if (row == 0 && ahead.begin(pass)) {
        add_values<Codes, kHalf, R, true>(rows, row, cache, tile, at, weights, ahead, pass);
      } else {
        add_values<Codes, kHalf, R, false>(rows, row, cache, tile, at, weights, ahead, pass);
      }
      pass += kPasses;
    };
    for (int64_t at = 0; at < bytes; at += kByteLanes) {
      add.template operator()<0>(at);
      if constexpr (Codes::kParts == 2) add.template operator()<1>(at);
    }
  });
}

// ---- with the scales of groups

// Vectors of sums that are made together for R rows.
template <typename Codes, int R>
constexpr int kGroupVectors = static_cast<int>(Codes::kValueDims) / kLanes / (R <= 4 ? 1 : 2);

// Adds the sums of R rows over the dims of kGroupVectors vectors from kFrom on, of those of a step from d on.
template <int kFrom, typename Codes, int R, bool kPrefetches>
void add_group_values(const HeadRows& rows, int64_t row, const StoredTile& tile, int64_t d,
                      const IntegerWeights& weights, const PassAhead& next) {
  constexpr int kVectors = kGroupVectors<Codes, R>, kOfGroup = Codes::kGroup / kLanes, kFirstGroup = kFrom / kOfGroup;
  const PassAhead ahead = next;
  const Codes codes;
  const int16_t* const words = words_of(weights, d / Codes::kGroup + kFirstGroup, row);
  IntVec sums[R][kVectors] = {};
  for (int t = 0; t < kTileTokens; t += 2) {
    if constexpr (kPrefetches) ahead.prefetch(t);
    Shorts pairs[kVectors];
    codes.template values<kFrom>(tile.codes[t] + d / 2, tile.codes[t + 1] + d / 2, pairs);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int16_t* const weight = words + (v / kOfGroup * kCodeRows + r) * kTileTokens + t;
        sums[r][v] = add_pairs(sums[r][v], pairs[v], repeat_pair(weight));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float* const acc = rows.acc + (row + r) * rows.acc_stride + d + kFrom * kLanes;
    Vec of_dims[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) of_dims[v] = to_floats(sums[r][v]);
    Codes::order_values(of_dims);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const float unit = weights.units[row + r] * weights.of_groups[d / Codes::kGroup + kFirstGroup + v / kOfGroup];
      add_product(acc + v * kLanes, of_dims[v] * unit, rows.factor + row + r);
    }
  }
}

// Adds the products of all rows.
template <typename Codes>
inline void add_all_groups(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                           const IntegerWeights& weights, const NextRows& next_rows) {
  PassAhead ahead(next_rows, cache.dim / Codes::kValueDims);
  for_each_even_block<kMostBlockRows>(rows.count, [&]<int R>(int64_t row) {
    for (int64_t d = 0; d < cache.dim; d += Codes::kValueDims) {
      if (row == 0 && ahead.begin(d / Codes::kValueDims)) {
        add_group_values<0, Codes, R, true>(rows, row, tile, d, weights, ahead);
      } else {
        add_group_values<0, Codes, R, false>(rows, row, tile, d, weights, ahead);
      }
      if constexpr (R > 4) {
        add_group_values<kGroupVectors<Codes, R>, Codes, R, false>(rows, row, tile, d, weights, ahead);
      }
    }
  });
}

// ---- both

// Adds the products of all rows, which attend to the same keys. Returns false, having added nothing, if the weights
// cannot be integers.
inline bool accumulate_integers(const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                                const NextRows& next_rows, const Scratch& scratch) {
  return with_integers(cache.format, [&]<typename Codes>() {
    IntegerWeights weights;
    if (!make_integer_weights<Codes>(rows, cache, tile, scratch, weights)) return false;
    prefetch_all_scales(next_rows);
    if constexpr (kHasGroups<Codes>) {
      add_all_groups<Codes>(rows, cache, tile, weights, next_rows);
    } else {
      add_all_values<Codes>(rows, cache, tile, weights, next_rows);
    }
    return true;
  });
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
