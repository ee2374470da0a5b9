// Scores of few query rows from the codes of keys, by exact products of integers.
//
// A query row becomes int16 times its largest magnitude / 32767: the error is at most 1.5e-5 of that number, below
// half a step of float16 there. Products with the codes of a key are added in int32, and multiplied with the scales of
// groups in float32.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/integer_codes.hpp"
#include "pagecore/ops/cpu/kernels/products/scores.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

// The factor that makes numbers integers up to `most`, from the bits of the largest magnitude: 0 if all are 0. Returns
// false for infinities and NaN, whose bits are the largest, and numbers that are too small.
PC_FORCE_INLINE bool integer_factor(int32_t largest, float& factor, float& unit, float most = kLargestShort) {
  const float number = __builtin_bit_cast(float, largest);
  factor = unit = 0.0f;
  if (largest == 0) return true;
  if (largest >= kInfinityBits || number < kLeastScale) return false;
  factor = most / number;
  unit = number / most;
  return true;
}

// Writes the integers of a row, in the order of its dims, and returns their sum.
PC_FORCE_INLINE float round_row(const float* row, int64_t dim, float factor, int16_t* to) {
  IntVec sums{};
  for (int64_t d = 0; d < dim; d += 2 * kLanes) {
    const IntVec low = nearest(load(row + d) * factor), high = nearest(load(row + d + kLanes) * factor);
    sums += low + high;
    store_shorts(to + d, low, high);
  }
  return sum(to_floats(sums));
}

// Writes a row in the order of the operands, each of which has `count` rows in turn.
template <typename Codes>
inline void order_integers(const int16_t* row, int64_t dim, int64_t count, int16_t* to) {
  for (int64_t d = 0; d < dim; d += kBytesDims<Codes>) {
    for (int operand = 0; operand < kOperands<Codes>; ++operand, to += count * kWordLanes) {
      for (int word = 0; word < kWordLanes; ++word) {
        const int64_t at = d + dim_of<Codes>(operand, word);
        to[word] = at < dim ? row[at] : int16_t{0};
      }
    }
  }
}

// Writes `count` query rows as integers for score_integers(), in its blocks of rows. `given` is scratch for a row.
// Returns false if a row cannot be written so.
inline bool make_integers(const float* rows, int64_t stride, int64_t count, const Cache& cache, int16_t* given,
                          int16_t* integers, IntegerRow* of_rows) {
  const int64_t dim = cache.dim;
  bool made = true;
  const auto make = [&](const float* row, IntegerRow& of_row, int64_t together, int16_t* to) {
    IntVec bits{};
    for (int64_t d = 0; d < dim; d += kLanes) bits = max(bits, (IntVec)load(row + d) & kMagnitudeBits);
    float factor;
    made = made && integer_factor(max_of_lanes(bits)[0], factor, of_row.unit);
    if (!made) return;
    of_row.sum = round_row(row, dim, factor, given);
    with_integers(cache.format, [&]<typename Codes>() {
      order_integers<Codes>(given, dim, together, to);
      of_row.unit *= Codes::kUnit;
    });
  };
  for_each_even_block(count, [&]<int R>(int64_t first) {
    int16_t* const to = integers + first * integer_padded(dim);
    for (int r = 0; r < R; ++r) make(rows + (first + r) * stride, of_rows[first + r], R, to + r * kWordLanes);
  });
  return made;
}

// Stores the scales of 8 groups from lane `first` on twice each; the last 4 of them only if there is a vector for them.
PC_FORCE_INLINE void store_twice(float* to, Vec scales, [[maybe_unused]] int first, [[maybe_unused]] bool all) {
#if defined(__AVX512F__)
  const IntVec order = IntVec{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7} + first;
  store(to, (Vec)_mm512_maskz_permutexvar_ps(kAllLanes, (__m512i)order, (__m512)scales));
#else
  store(to, (Vec)_mm256_permutevar8x32_ps((__m256)scales, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)));
  if (all) store(to + kLanes, (Vec)_mm256_permutevar8x32_ps((__m256)scales, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)));
#endif
}

// Eight scale bytes, or four and zeros.
PC_FORCE_INLINE int64_t scale_bytes(const char* p, bool all) {
  int64_t eight = 0;
  uint32_t four = 0;
  if (!all) {
    __builtin_memcpy(&four, p, sizeof four);
    return four;
  }
  __builtin_memcpy(&eight, p, sizeof eight);
  return eight;
}

// Vectors of stored bytes of a row with the numbers of 16 times `groups` dims, times kLanes.
PC_FORCE_INLINE int64_t scale_lanes(int64_t groups) { return (2 * groups + kLanes - 1) / kLanes * kLanes; }

// Writes the scales of the lanes of the sums of each key, [64, scale_lanes]: two lanes for each group.
inline void spread_scales(const Cache& cache, const StoredTile& tile, float* lanes) {
  constexpr int kTokens = kLanes / 8;  // whose scales fill a vector
  const int64_t groups = cache.dim / 16, stride = scale_lanes(groups);
  for (int64_t g = 0; g < groups; g += 8) {
    const bool all = groups - g >= 8;
    float* to = lanes + 2 * g;
    for (int t = 0; t < kTileTokens; t += kTokens, to += kTokens * stride) {
      const auto bytes = [&](int i) __attribute__((always_inline)) { return scale_bytes(tile.scales[t + i] + g, all); };
      const Vec scales = numbers_of_scales(cache.format, _mm_set_epi64x(bytes(kTokens - 1), bytes(0)));
#pragma GCC unroll 2
      for (int i = 0; i < kTokens; ++i) store_twice(to + i * stride, scales, 8 * i, all);
    }
  }
}

// Keys that are multiplied together, so that their sums do not wait for each other.
constexpr int kIntegerKeys = kLanes == 16 ? kBlockTokens : 1;

// Adds the products of a part of the vectors of stored bytes of some keys with R query rows to the lanes of their sums.
template <int kPart, typename Codes, int R>
PC_FORCE_INLINE void multiply_part(const Codes& codes, const Bytes (&stored)[kIntegerKeys], const int16_t* query,
                                   IntVec (&sums)[kIntegerKeys][R]) {
  Shorts words[kIntegerKeys][2];
#pragma GCC unroll 4
  for (int k = 0; k < kIntegerKeys; ++k) codes.template words<kPart>(stored[k], words[k]);
#pragma GCC unroll 2
  for (int e = 0; e < 2; ++e) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Shorts numbers = load_shorts(query + ((2 * kPart + e) * R + r) * kWordLanes);
#pragma GCC unroll 4
      for (int k = 0; k < kIntegerKeys; ++k) sums[k][r] = add_pairs(sums[k][r], words[k][e], numbers);
    }
  }
}

// The lanes of the sums over the dims of some keys and R query rows. `scales` are those of the lanes of the first key.
template <typename Codes, int R>
PC_FORCE_INLINE void multiply_keys(const Codes& codes, const char* const* keys, int64_t bytes, const int16_t* query,
                                   [[maybe_unused]] const float* scales, [[maybe_unused]] int64_t scale_stride,
                                   Vec (&lanes)[kIntegerKeys][R]) {
  IntVec sums[kIntegerKeys][R] = {};
  for (int64_t at = 0; at < bytes; at += kByteLanes, query += kBytesDims<Codes> * R) {
    Bytes stored[kIntegerKeys];
#pragma GCC unroll 4
    for (int k = 0; k < kIntegerKeys; ++k) stored[k] = load_stored(keys[k] + at, bytes - at);
    multiply_part<0>(codes, stored, query, sums);
    if constexpr (Codes::kParts == 2) multiply_part<1>(codes, stored, query, sums);
    if constexpr (Codes::kGroup != 0) {
#pragma GCC unroll 4
      for (int k = 0; k < kIntegerKeys; ++k) {
        const Vec scale = load(scales + k * scale_stride);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          lanes[k][r] = fma(to_floats(sums[k][r]), scale, lanes[k][r]);
          sums[k][r] = IntVec{};
        }
      }
      scales += kLanes;
    }
  }
  if constexpr (Codes::kGroup == 0) {
#pragma GCC unroll 4
    for (int k = 0; k < kIntegerKeys; ++k) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) lanes[k][r] = to_floats(sums[k][r]);
    }
  }
}

// Scores [R, 64] without the units and the zero points.
template <typename Codes, int R>
void score_integers_of(const StoredTile& tile, int64_t bytes, const int16_t* query, const float* scales,
                       const RowAhead& next, float* scores) {
  const RowAhead ahead = next;
  const Codes codes;
  const int64_t scale_stride = scale_lanes(bytes / 8);
  for (int t = 0; t < kTileTokens; t += kBlockTokens) {
    Vec sums[R][kBlockTokens];
#pragma GCC unroll 4
    for (int first = 0; first < kBlockTokens; first += kIntegerKeys) {
      Vec lanes[kIntegerKeys][R] = {};
#pragma GCC unroll 4
      for (int k = 0; k < kIntegerKeys; ++k) ahead.prefetch_streams(t + first + k);
      multiply_keys<Codes, R>(codes, tile.codes + t + first, bytes, query, scales + (t + first) * scale_stride,
                              scale_stride, lanes);
#pragma GCC unroll 4
      for (int k = 0; k < kIntegerKeys; ++k) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r][first + k] = lanes[k][r];
      }
    }
    store_sums<R>(sums, scores + t);
  }
}

inline void score_integers(const HeadRows& rows, const Cache& cache, const StoredTile& tile, const NextRows& next_rows,
                           const Scratch& scratch) {
  const int64_t bytes = row_bytes(cache), stride = integer_padded(cache.dim);
  prefetch_all_scales(next_rows);
  with_integers(cache.format, [&]<typename Codes>() {
    if constexpr (Codes::kGroup != 0) spread_scales(cache, tile, scratch.key);
    alignas(64) float zero_points[kTileTokens] = {};
    if constexpr (Codes::kHasZeroPoints) load_zero_points(tile, zero_points);
    for_each_even_block(rows.count, [&]<int R>(int64_t row) {
      const RowAhead ahead = row == 0 && next_rows.rows.base != nullptr ? RowAhead(next_rows) : RowAhead(tile);
      float* scores = rows.scores + row * kTileTokens;
      score_integers_of<Codes, R>(tile, bytes, rows.query_integers + row * stride, scratch.key, ahead, scores);
      for (int r = 0; r < R; ++r, scores += kTileTokens) {
        const IntegerRow query = rows.integer_rows[row + r];
        for (int t = 0; t < kTileTokens; t += kLanes) {
          Vec score = load(scores + t);
          if constexpr (Codes::kHasZeroPoints) score = fma(load(zero_points + t), splat(-query.sum), score);
          store(scores + t, score * query.unit);
        }
      }
    });
  });
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
