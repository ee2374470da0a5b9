// Scores of few query rows from the codes of keys: pairs of bfloat16 of four keys are made in registers and multiplied
// at once, so that the loads, the lookups and the products of neighbouring keys overlap.
//
//   four keys   for each chunk of 128 dims, or of the last 64
//                 lanes [key, row] += pairs of the key . pairs of the row
//               a lane has dims of one group, so that its sum is multiplied with the scale of that group
//   16 lanes    added for 16 sums at a time, by zips and additions that leave one sum in each lane
//
// order_queries() gives the query rows the order of the operands of keys.
#pragma once

#include "pagecore/ops/cpu/kernels/code_pairs.hpp"
#include "pagecore/ops/cpu/kernels/dot.hpp"
#include "pagecore/ops/cpu/kernels/few_rows.hpp"
#include "pagecore/ops/cpu/kernels/group_scales.hpp"
#include "pagecore/ops/cpu/kernels/transpose.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512VBMI__)

// Keys that are multiplied together, so that their sums do not wait for each other.
constexpr int kKeys = 4;

// Adds the products of a chunk of the keys from `first` on. `query` is [kVectors, R, 32].
template <int kVectors, int R, typename Codes>
PC_FORCE_INLINE void multiply_chunk(const Codes& codes, const StoredTile& tile, int first, int64_t d,
                                    const uint16_t* query, Vec (&sums)[kKeys][R]) {
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; v += 2, query += 2 * R * kPairLanes) {
    PairVec pairs[kKeys][2];
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k) codes.template keys<kVectors>(tile, first + k, d, v, pairs[k]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const PairVec q = load_pairs(query + (i * R + r) * kPairLanes);
#pragma GCC unroll 4
        for (int k = 0; k < kKeys; ++k) sums[k][r] = dot(pairs[k][i], q, sums[k][r]);
      }
    }
  }
}

// The same of a chunk whose lanes have scales, [64, groups].
template <int kVectors, int kGroup, int R, typename Codes>
PC_FORCE_INLINE void multiply_scaled_chunk(const Codes& codes, const StoredTile& tile, int first, int64_t d,
                                           int64_t dim, const uint16_t* query, const uint16_t* scales,
                                           Vec (&totals)[kKeys][R]) {
  const LaneScales<kVectors * kPairLanes / kGroup> lanes;
  Vec sums[kKeys][R] = {};
  multiply_chunk<kVectors, R>(codes, tile, first, d, query, sums);
#pragma GCC unroll 4
  for (int k = 0; k < kKeys; ++k) {
    const Vec scale = lanes.of(scales + ((first + k) * dim + d) / kGroup);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) totals[k][r] = fma(sums[k][r], scale, totals[k][r]);
  }
}

// The lanes of the scores of the keys from `first` on.
template <int kGroup, int R, typename Codes>
PC_FORCE_INLINE void multiply_keys(const Codes& codes, const StoredTile& tile, int first, int64_t dim,
                                   const uint16_t* query, const uint16_t* scales, Vec (&sums)[kKeys][R]) {
  const auto multiply = [&]<int kVectors>(int64_t d) __attribute__((always_inline)) {
    if constexpr (kGroup == 0) {
      multiply_chunk<kVectors, R>(codes, tile, first, d, query + d * R, sums);
    } else {
      multiply_scaled_chunk<kVectors, kGroup, R>(codes, tile, first, d, dim, query + d * R, scales, sums);
    }
  };
  int64_t d = 0;
  for (; d + 4 * kPairLanes <= dim; d += 4 * kPairLanes) multiply.template operator()<4>(d);
  if (d < dim) multiply.template operator()<2>(d);
}

// {a0 + a2, b0 + b2, a1 + a3, b1 + b3} in each quarter, and the same of pairs of lanes. Zips within quarters take any
// port of the processor.
PC_FORCE_INLINE Vec add_zipped(Vec a, Vec b) { return zip_low(a, b) + zip_high(a, b); }
PC_FORCE_INLINE Vec add_zipped_pairs(Vec a, Vec b) { return low_pairs(a, b) + high_pairs(a, b); }

// The sums of the lanes of 16 vectors: lane 4 k + i is that of vector [k][i].
PC_FORCE_INLINE Vec sum_lanes(const Vec (&v)[4][4]) {
  Vec four[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) four[k] = add_zipped_pairs(add_zipped(v[k][0], v[k][1]), add_zipped(v[k][2], v[k][3]));
  const Vec a = even_quarters(four[0], four[1]) + odd_quarters(four[0], four[1]);
  const Vec b = even_quarters(four[2], four[3]) + odd_quarters(four[2], four[3]);
  return even_quarters(a, b) + odd_quarters(a, b);
}

// The scores of 16 keys, a vector for each query row, from R vectors of sum_lanes(): quarter k has those of row k R
// / 4.
template <int R>
PC_FORCE_INLINE void arrange(const Vec* parts, Vec (&of_rows)[4]) {
  if constexpr (R == 1) of_rows[0] = parts[0];
  if constexpr (R == 2) {
    of_rows[0] = (Vec)_mm512_maskz_shuffle_f32x4(kAllLanes, (__m512)parts[0], (__m512)parts[1], 0x44);
    of_rows[1] = (Vec)_mm512_maskz_shuffle_f32x4(kAllLanes, (__m512)parts[0], (__m512)parts[1], 0xee);
  }
  if constexpr (R == 4) transpose_quarters(parts[0], parts[1], parts[2], parts[3], of_rows);
}

// The sum of the numbers of each of R query rows; `query` is [dim / 32, R, 32].
template <int R>
PC_FORCE_INLINE void sum_queries(const uint16_t* query, int64_t dim, float (&sums)[R]) {
  const PairVec ones = PairVec{} + 0x3f80;
  Vec lanes[R] = {};
  for (int64_t d = 0; d < dim; d += kPairLanes, query += R * kPairLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) lanes[r] = dot(load_pairs(query + r * kPairLanes), ones, lanes[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r] = sum(lanes[r]);
}

// Scores [R, 64]. The dim is a constant if kDim is not 0.
//
// The lanes of a part's sums are added a part later, so that the products of the next keys do not wait for them.
template <typename Codes, int kGroup, int R, int64_t kDim>
void score_block_of_rows(const StoredTile& tile, int64_t any_dim, const uint16_t* query, const uint16_t* scales,
                         const RowAhead& next, float* scores) {
  constexpr int kSteps = 4 / R, kParts = kTileTokens / kKeys / kSteps;
  const RowAhead ahead = next;
  const int64_t dim = kDim == 0 ? any_dim : kDim;
  const Codes codes(tile);
  Vec kept[2][4][4], parts[kParts];
  int key = 0;
#pragma GCC unroll 1
  for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 4
    for (int step = 0; step < kSteps; ++step, key += kKeys) {
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) ahead.prefetch_streams_near(key + i);
      Vec sums[kKeys][R] = {};
      multiply_keys<kGroup, R>(codes, tile, key, dim, query, scales, sums);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) kept[part % 2][r * kSteps + step][i] = sums[i][r];
      }
    }
    if (part > 0) parts[part - 1] = sum_lanes(kept[(part - 1) % 2]);
  }
  parts[kParts - 1] = sum_lanes(kept[(kParts - 1) % 2]);
  [[maybe_unused]] float query_sums[R];
  if constexpr (Codes::kHasZeroPoints) sum_queries(query, dim, query_sums);
#pragma GCC unroll 1
  for (int t = 0; t < kTileTokens; t += kLanes) {
    Vec of_rows[4];
    arrange<R>(parts + t / kLanes * R, of_rows);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if constexpr (Codes::kHasZeroPoints) of_rows[r] = fma(codes.zero_points(t), splat(-query_sums[r]), of_rows[r]);
      store(scores + r * kTileTokens + t, of_rows[r]);
    }
  }
}

template <typename Codes, int kGroup>
void score_codes_of(const HeadRows& rows, const StoredTile& tile, const NextRows& next_rows, const uint16_t* scales,
                    int64_t dim) {
  constexpr int64_t kUsualDim = 128;
  prefetch_all_scales(next_rows);
  for_each_even_block(rows.count, [&]<int R>(int64_t row) __attribute__((always_inline)) {
    const uint16_t* query = rows.query_pairs + row * rows.query_stride;
    float* scores = rows.scores + row * kTileTokens;
    const RowAhead ahead = row == 0 && next_rows.rows.base != nullptr ? RowAhead(next_rows) : RowAhead(tile);
    if (dim == kUsualDim) {
      score_block_of_rows<Codes, kGroup, R, kUsualDim>(tile, dim, query, scales, ahead, scores);
    } else {
      score_block_of_rows<Codes, kGroup, R, 0>(tile, dim, query, scales, ahead, scores);
    }
  });
}

// Scores of all rows. The queries are in the order of order_queries().
inline void score_codes(const HeadRows& rows, const Cache& cache, const StoredTile& tile, const NextRows& next_rows,
                        const Scratch& scratch) {
  auto* scales = reinterpret_cast<uint16_t*>(scratch.key);
  const int64_t dim = cache.dim;
  if (group_size(cache.format) != 0) convert_scales(cache, tile, scales);
  switch (cache.format) {
    case Format::Plain: break;
    case Format::E4M3:
    case Format::E4M3Token:
      return score_codes_of<BytePairs<Float8Unpacker<E4M3Code>>, 0>(rows, tile, next_rows, scales, dim);
    case Format::E5M2:
      return score_codes_of<BytePairs<Float8Unpacker<E5M2Code>>, 0>(rows, tile, next_rows, scales, dim);
    case Format::MXFP8:
      return score_codes_of<BytePairs<Float8Unpacker<E4M3Code>, true>, 32>(rows, tile, next_rows, scales, dim);
    case Format::I8Token: return score_codes_of<BytePairs<Int8Unpacker>, 0>(rows, tile, next_rows, scales, dim);
    case Format::I4Token: return score_codes_of<NibblePairs<Int4Codes>, 0>(rows, tile, next_rows, scales, dim);
    case Format::FP4Block16:
    case Format::NVFP4: return score_codes_of<NibblePairs<E2M1Codes>, 16>(rows, tile, next_rows, scales, dim);
  }
}

// Writes a chunk of `count` query rows as [kVectors, count, 32].
template <int kVectors, typename Codes>
inline void order_chunk(const uint16_t* rows, int64_t stride, int64_t count, uint16_t* to) {
  for (int v = 0; v < kVectors; ++v) {
    for (int64_t r = 0; r < count; ++r) {
      for (int i = 0; i < kPairLanes; ++i) *to++ = rows[r * stride + Codes::template key_dim<kVectors>(v, i)];
    }
  }
}

template <typename Codes>
inline void order_rows(const uint16_t* rows, int64_t dim, int64_t count, uint16_t* to) {
  int64_t d = 0;
  for (; d + 4 * kPairLanes <= dim; d += 4 * kPairLanes) order_chunk<4, Codes>(rows + d, dim, count, to + d * count);
  if (d < dim) order_chunk<2, Codes>(rows + d, dim, count, to + d * count);
}

// Orders the numbers of `count` query rows that are multiplied together, [dim / 32, count, 32]. `given` is scratch.
inline void order_block(const Cache& cache, uint16_t* rows, int64_t count, uint16_t* given) {
  const int64_t dim = cache.dim;
  __builtin_memcpy(given, rows, static_cast<size_t>(count * dim) * sizeof *rows);
  if (cache.format == Format::MXFP8) return order_rows<BytePairs<Int8Unpacker, true>>(given, dim, count, rows);
  if (row_bytes(cache) == dim) return order_rows<BytePairs<Int8Unpacker>>(given, dim, count, rows);
  order_rows<NibblePairs<Int4Codes>>(given, dim, count, rows);
}

// Orders the numbers of `count` query rows for score_codes(), in its blocks of rows.
inline void order_queries(const Cache& cache, uint16_t* rows, int64_t count, uint16_t* given) {
  for_each_even_block(count, [&]<int R>(int64_t row) { order_block(cache, rows + row * cache.dim, R, given); });
}

#else

inline void score_codes(const HeadRows&, const Cache&, const StoredTile&, const NextRows&, const Scratch&) {
  __builtin_trap();
}
inline void order_queries(const Cache&, uint16_t*, int64_t, uint16_t*) {}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
