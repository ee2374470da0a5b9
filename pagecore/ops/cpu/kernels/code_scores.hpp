// Scores of few query rows from the codes of keys: pairs of bfloat16 of 16 keys are made and multiplied while they are
// in the L1 cache. They need fewer shuffles than a panel (pack_key_codes.hpp), whose lanes are keys.
//
// A vector has 16 bytes of four keys, one key a quarter. A product with numbers of a query, repeated in each quarter,
// makes four partial sums of each key:
//
//   quarters of codes    key 0: c0 .. c15   key 4   key 8   key 12    three more vectors: keys 1, 5 ..; 2, 6 ..; 3, 7
//   .. pairs                key 0: n0 .. n7    key 4   key 8   key 12    and n8 .. n15 query                q0 .. q7 q0
//   ..   q0 ..   q0 ..     and q8 .. q15
//
// Sums of groups are multiplied with the scales of the groups.
#pragma once

#include "pagecore/ops/cpu/kernels/code_pairs.hpp"
#include "pagecore/ops/cpu/kernels/dot.hpp"
#include "pagecore/ops/cpu/kernels/group_scales.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Up to this number of query rows, codes are multiplied without a panel.
constexpr int64_t kCodeRows = 8;

#if defined(__AVX512VBMI__)

// Bytes of each row that are loaded at once, vectors that 16 rows make of 16 bytes, and words of eight numbers of 16
// rows.
constexpr int64_t kChunk = 32;
constexpr int kRowVectors = 4;
constexpr int64_t kEightWords = kRowVectors * kWordLanes;

// Loads 32 bytes of the rows k, k + 4, k + 8, k + 12: the first and the last 16 bytes of each row, one row a quarter.
PC_FORCE_INLINE void load_quarters(const char* const* rows, int64_t at, int k, Bytes& first, Bytes& second) {
  const auto half = [&](int row) __attribute__((always_inline)) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[row] + at));
  };
  const auto both = [&](int row) __attribute__((always_inline)) {
    return (Vec)_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(half(row)), half(row + 4), 1);
  };
  const Vec a = both(k), b = both(k + 8);
  first = (Bytes)even_quarters(a, b), second = (Bytes)odd_quarters(a, b);
}

// Eight numbers, once in each quarter.
PC_FORCE_INLINE PairVec splat_eight(const uint16_t* p) {
  return (PairVec)_mm512_maskz_broadcast_i32x4(kAllLanes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// {a0 + a1, a2 + a3, b0 + b1, b2 + b3} of each quarter.
PC_FORCE_INLINE Vec add_neighbours(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// Lane k of each quarter, four times.
template <int k>
PC_FORCE_INLINE Vec splat_lane(Vec v) {
  return (Vec)_mm512_maskz_permute_ps(kAllLanes, (__m512)v, k * 0x55);
}

// Writes the pairs of 16 rows, [dim / 8][vector]: eight numbers of four rows each. Prefetches 16 rows from index
// `place` on meanwhile, a few at a time.
template <typename Codes>
PC_FORCE_INLINE void unpack_quarters(const Codes& codes, const char* const* rows, int64_t bytes,
                                     const NextRows& next_rows, int place, uint16_t* pairs) {
  const int64_t end = place + kLanes, rows_of_step = (kLanes * kChunk / kRowVectors + bytes - 1) / bytes;
  for (int64_t at = 0; at < bytes; at += kChunk) {
#pragma GCC unroll 4
    for (int k = 0; k < kRowVectors; ++k) {
      if (next_rows.rows.base != nullptr) {
        for (int64_t i = 0; i < rows_of_step && place < end; ++i) prefetch_row(next_rows, place++);
      }
      Bytes pieces[2];
      load_quarters(rows, at, k, pieces[0], pieces[1]);
      uint16_t* to = pairs + k * kWordLanes;
#pragma GCC unroll 2
      for (int piece = 0; piece < 2; ++piece) {
#pragma GCC unroll 2
        for (int step = 0; step < Codes::kSteps; ++step) {
          const BytePair numbers = codes.keys(pieces[piece], k, step);
          const int at_low = 2 * Codes::kSteps * piece + step, at_high = at_low + Codes::kSteps;
          store_words(to + at_low * kEightWords, zip_low(numbers.low, numbers.high));
          store_words(to + at_high * kEightWords, zip_high(numbers.low, numbers.high));
        }
      }
    }
    pairs += 4 * Codes::kSteps * kEightWords;
  }
}

// Scores [R, 64] of 16 rows from their pairs.
template <int R>
PC_FORCE_INLINE void multiply_quarters(const uint16_t* query, int64_t stride, const uint16_t* pairs, int64_t dim,
                                       float* scores) {
  Vec sums[R][kRowVectors] = {};
  for (int64_t d = 0; d < dim; d += 8, pairs += kEightWords) {
    PairVec words[kRowVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kRowVectors; ++k) words[k] = load_pairs(pairs + k * kWordLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const PairVec q = splat_eight(query + r * stride + d);
#pragma GCC unroll 4
      for (int k = 0; k < kRowVectors; ++k) sums[r][k] = dot(words[k], q, sums[r][k]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    store(scores + r * kTileTokens,
          add_neighbours(add_neighbours(sums[r][0], sums[r][1]), add_neighbours(sums[r][2], sums[r][3])));
  }
}

// The sums of the vectors k and k + 1, those of each group times the scales [groups, 64] of its rows.
template <int kGroup, int k, int R>
PC_FORCE_INLINE void multiply_groups(const uint16_t* query, int64_t stride, const uint16_t* pairs, const float* scales,
                                     int64_t dim, Vec (&out)[R]) {
  Vec total[R][2] = {};
  pairs += k * kWordLanes;
  for (int64_t d = 0; d < dim; d += kGroup, scales += kTileTokens) {
    Vec sums[R][2] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; i += 8, pairs += kEightWords) {
      const PairVec a = load_pairs(pairs), b = load_pairs(pairs + kWordLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const PairVec q = splat_eight(query + r * stride + d + i);
        sums[r][0] = dot(a, q, sums[r][0]), sums[r][1] = dot(b, q, sums[r][1]);
      }
    }
    const Vec scale = load(scales), of_a = splat_lane<k>(scale), of_b = splat_lane<k + 1>(scale);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      total[r][0] = fma(sums[r][0], of_a, total[r][0]), total[r][1] = fma(sums[r][1], of_b, total[r][1]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) out[r] = add_neighbours(total[r][0], total[r][1]);
}

template <int kGroup, int R>
PC_FORCE_INLINE void score_sixteen(const uint16_t* query, int64_t stride, const uint16_t* pairs, const float* scales,
                                   int64_t dim, float* scores) {
  if constexpr (kGroup == 0) {
    multiply_quarters<R>(query, stride, pairs, dim, scores);
  } else {
    Vec first[R], second[R];
    multiply_groups<kGroup, 0>(query, stride, pairs, scales, dim, first);
    multiply_groups<kGroup, 2>(query, stride, pairs, scales, dim, second);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(scores + r * kTileTokens, add_neighbours(first[r], second[r]));
  }
}

template <typename Codes, int kGroup>
void score_codes_of(const HeadRows& rows, const StoredTile& tile, const NextRows& ahead, const float* scales,
                    int64_t dim, uint16_t* pairs) {
  const NextRows next_rows = ahead;
  Codes codes(tile);
  for (int t = 0; t < kTileTokens; t += kLanes) {
    codes.set_tokens(t);
    unpack_quarters(codes, tile.codes + t, dim / Codes::kChunkDims * kChunk, next_rows, t, pairs);
    for_each_row_block(rows.count, [&]<int R>(int64_t row) __attribute__((always_inline)) {
      score_sixteen<kGroup, R>(rows.query_pairs + row * rows.query_stride, rows.query_stride, pairs, scales + t, dim,
                               rows.scores + row * kTileTokens + t);
    });
  }
}

// Scores of all rows. The queries are in the order of order_queries().
inline void score_codes(const HeadRows& rows, const Cache& cache, const StoredTile& tile, const NextRows& next_rows,
                        const Scratch& scratch) {
  float* scales = scratch.key;
  const int64_t dim = cache.dim;
  uint16_t* pairs = scratch.unpacked;
  if (group_size(cache.format) != 0) expand_scales(cache, tile, scales);
  switch (cache.format) {
    case Format::Plain: break;
    case Format::E4M3:
    case Format::E4M3Token:
      return score_codes_of<BytePairs<Float8Unpacker<E4M3Code>>, 0>(rows, tile, next_rows, scales, dim, pairs);
    case Format::E5M2:
      return score_codes_of<BytePairs<Float8Unpacker<E5M2Code>>, 0>(rows, tile, next_rows, scales, dim, pairs);
    case Format::MXFP8:
      return score_codes_of<BytePairs<Float8Unpacker<E4M3Code>>, 32>(rows, tile, next_rows, scales, dim, pairs);
    case Format::I8Token: return score_codes_of<BytePairs<Int8Unpacker>, 0>(rows, tile, next_rows, scales, dim, pairs);
    case Format::I4Token: return score_codes_of<NibblePairs<Int4Bytes>, 0>(rows, tile, next_rows, scales, dim, pairs);
    case Format::FP4Block16:
    case Format::NVFP4: return score_codes_of<NibblePairs<E2M1Bytes>, 16>(rows, tile, next_rows, scales, dim, pairs);
  }
}

// Orders the numbers of a query row for score_codes(): in each 16 numbers those with even index come first if the keys
// have codes of 4 bits.
PC_FORCE_INLINE void order_queries(const Cache& cache, uint16_t* row) {
  constexpr int kTurn = 16;
  if (row_bytes(cache) == cache.dim) return;
  for (int64_t d = 0; d < cache.dim; d += kTurn) {
    uint16_t given[kTurn];
    __builtin_memcpy(given, row + d, sizeof given);
    for (int i = 0; i < kTurn; ++i) row[d + i] = given[i % (kTurn / 2) * 2 + i / (kTurn / 2)];
  }
}

#else

inline void score_codes(const HeadRows&, const Cache&, const StoredTile&, const NextRows&, const Scratch&) {
  __builtin_trap();
}
PC_FORCE_INLINE void order_queries(const Cache&, uint16_t*) {}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
