// Scores of few query rows from the codes of keys, by exact products of integers.
//
// A query row becomes int16 times its largest magnitude / 32767: the error is at most 1.5e-5 of that number, below
// half a step of float16 there. Products with the codes of a key are added in int32, and multiplied with the scales of
// groups in float32.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/group_numbers.hpp"
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

// True if a lane is a key for blocks of R rows: with the scales of groups, and with AVX-512, where four rows or more
// take less time to transpose a key than to add lanes. A lane holds the sum of 512 dims of int8.
template <typename Codes, int R>
PC_FORCE_INLINE bool keys_in_lanes(int64_t dim) {
  return kHasGroups<Codes> || (kLanes == 16 && R >= 4 && (Codes::kParts == 2 || dim <= 512));
}

// Words of an operand that meet different numbers of a query row: those of a lane if it is a key.
PC_FORCE_INLINE int query_words(bool in_lanes) { return in_lanes ? 2 : kWordLanes; }

// Writes a row in the order of the operands, each of which has R rows in turn.
template <typename Codes, int R>
inline void order_integers(const int16_t* row, int64_t dim, int16_t* to) {
  const int words = query_words(keys_in_lanes<Codes, R>(dim));
  for (int64_t d = 0; d < dim; d += kOperands<Codes> * words) {
    for (int operand = 0; operand < kOperands<Codes>; ++operand, to += R * words) {
      for (int word = 0; word < words; ++word) {
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
  const auto make = [&]<int R>(const float* row, IntegerRow& of_row, int16_t* to, int64_t r) {
    IntVec bits{};
    for (int64_t d = 0; d < dim; d += kLanes) bits = max(bits, (IntVec)load(row + d) & kMagnitudeBits);
    float factor;
    made = made && integer_factor(max_of_lanes(bits)[0], factor, of_row.unit);
    if (!made) return;
    of_row.sum = round_row(row, dim, factor, given);
    with_integers(cache.format, [&]<typename Codes>() {
      order_integers<Codes, R>(given, dim, to + r * query_words(keys_in_lanes<Codes, R>(dim)));
      of_row.unit *= Codes::kUnit;
    });
  };
  for_each_even_block<kMostBlockRows>(count, [&]<int R>(int64_t first) {
    int16_t* const to = integers + first * integer_padded(dim);
    for (int r = 0; r < R; ++r) make.template operator()<R>(rows + (first + r) * stride, of_rows[first + r], to, r);
  });
  return made;
}

// Keys that are multiplied together with R rows, so that their sums do not wait for each other.
template <int R>
constexpr int kIntegerKeys = kLanes == 8 ? 1 : kBlockTokens / (R <= 4 ? 1 : 2);

// Adds the products of a part of the vectors of stored bytes of some keys with R query rows to the lanes of their sums.
template <int kPart, typename Codes, int R>
PC_FORCE_INLINE void multiply_part(const Codes& codes, const Bytes (&stored)[kIntegerKeys<R>], const int16_t* query,
                                   IntVec (&sums)[kIntegerKeys<R>][R]) {
  Shorts words[kIntegerKeys<R>][2];
#pragma GCC unroll 4
  for (int k = 0; k < kIntegerKeys<R>; ++k) codes.template words<kPart>(stored[k], words[k]);
#pragma GCC unroll 2
  for (int e = 0; e < 2; ++e) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Shorts numbers = load_shorts(query + ((2 * kPart + e) * R + r) * kWordLanes);
#pragma GCC unroll 4
      for (int k = 0; k < kIntegerKeys<R>; ++k) sums[k][r] = add_pairs(sums[k][r], words[k][e], numbers);
    }
  }
}

// The lanes of the sums over the dims of some keys and R query rows.
template <typename Codes, int R>
PC_FORCE_INLINE void multiply_keys(const Codes& codes, const char* const* keys, int64_t bytes, const int16_t* query,
                                   IntVec (&sums)[kIntegerKeys<R>][R]) {
  for (int64_t at = 0; at < bytes; at += kByteLanes, query += kBytesDims<Codes> * R) {
    Bytes stored[kIntegerKeys<R>];
#pragma GCC unroll 4
    for (int k = 0; k < kIntegerKeys<R>; ++k) stored[k] = load_stored(keys[k] + at, bytes - at);
    multiply_part<0>(codes, stored, query, sums);
    if constexpr (Codes::kParts == 2) multiply_part<1>(codes, stored, query, sums);
  }
}

// Scores [R, 64] without the units and the zero points.
template <typename Codes, int R>
void score_integers_of(const StoredTile& tile, int64_t bytes, const int16_t* query, const RowAhead& next,
                       float* scores) {
  const RowAhead ahead = next;
  const Codes codes;
  for (int t = 0; t < kTileTokens; t += kBlockTokens) {
    Vec sums[R][kBlockTokens];
#pragma GCC unroll 4
    for (int first = 0; first < kBlockTokens; first += kIntegerKeys<R>) {
      IntVec lanes[kIntegerKeys<R>][R] = {};
#pragma GCC unroll 4
      for (int k = 0; k < kIntegerKeys<R>; ++k) ahead.prefetch_streams(t + first + k);
      multiply_keys<Codes, R>(codes, tile.codes + t + first, bytes, query, lanes);
#pragma GCC unroll 4
      for (int k = 0; k < kIntegerKeys<R>; ++k) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][first + k] = to_floats(lanes[k][r]);
      }
    }
    store_sums<R>(sums, scores + t);
  }
}

// ---- keys in lanes

// Vectors of keys, a key in each lane, that are multiplied together with R rows.
template <int R>
constexpr int kKeyVectors = kLanes == 16 && R <= 4 ? 2 : 1;

// Adds the products of R query rows with a dword of the codes of each key.
template <typename Codes, int R>
PC_FORCE_INLINE void multiply_dwords(const Codes& codes, const Vec (&stored)[kKeyVectors<R>], const int16_t* query,
                                     IntVec (&sums)[kKeyVectors<R>][R]) {
  const auto multiply = [&]<int kPart>() __attribute__((always_inline)) {
    Shorts words[kKeyVectors<R>][2];
#pragma GCC unroll 2
    for (int k = 0; k < kKeyVectors<R>; ++k) codes.template words<kPart>((Bytes)stored[k], words[k]);
#pragma GCC unroll 2
    for (int e = 0; e < 2; ++e) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Shorts pair = repeat_pair(query + 2 * ((2 * kPart + e) * R + r));
#pragma GCC unroll 2
        for (int k = 0; k < kKeyVectors<R>; ++k) sums[k][r] = add_pairs(sums[k][r], words[k][e], pair);
      }
    }
  };
  multiply.template operator()<0>();
  if constexpr (Codes::kParts == 2) multiply.template operator()<1>();
}

// Scores [R, 64] without the units and the zero points, with the scales [groups, 64] if there are any.
//
// The codes of keys are transposed by dwords, of which a group has two: a lane has the sums of a key, which are
// multiplied with the scales of the keys after each group.
template <typename Codes, int R>
void score_lanes_of(const StoredTile& tile, int64_t dim, const int16_t* given, const float* scales,
                    const RowAhead& next, float* scores) {
  constexpr int64_t kDwordDims = 4 * Codes::kParts, kSquareDims = kDwordDims * kLanes, kStepDims = 2 * kDwordDims;
  static_assert(!kHasGroups<Codes> || Codes::kGroup == kStepDims);
  constexpr int kVectorKeys = kKeyVectors<R> * kLanes;
  const RowAhead ahead = next;
  const Codes codes;
  const int rows_a_step = static_cast<int>((kVectorKeys * kStepDims + dim - 1) / dim);
  int place = 0;  // of the row that is prefetched next
  for (int t = 0; t < kTileTokens; t += kVectorKeys) {
    const int16_t* query = given;
    const float* scale = scales + t;
    Vec totals[kKeyVectors<R>][R] = {};
    IntVec sums[kKeyVectors<R>][R] = {};
    for (int64_t d = 0; d < dim; d += kSquareDims) {
      const int dwords = static_cast<int>((dim - d < kSquareDims ? dim - d : kSquareDims) / kDwordDims);
      Vec transposed[kLanes][kKeyVectors<R>];
#pragma GCC unroll 2
      for (int k = 0; k < kKeyVectors<R>; ++k) {
        Vec square[kLanes];
        load_square(tile.codes + t + k * kLanes, d / Codes::kParts, dwords, square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) transposed[i][k] = square[i];
      }
      for (int i = 0; i < dwords; i += 2, query += kStepDims * R, scale += kTileTokens) {
        const int end = place + rows_a_step < kTileTokens ? place + rows_a_step : static_cast<int>(kTileTokens);
        for (; place < end; ++place) ahead.prefetch_streams(place);
        multiply_dwords<Codes, R>(codes, transposed[i], query, sums);
        multiply_dwords<Codes, R>(codes, transposed[i + 1], query + kDwordDims * R, sums);
        if constexpr (kHasGroups<Codes>) {
#pragma GCC unroll 2
          for (int k = 0; k < kKeyVectors<R>; ++k) {
            const Vec of_keys = load(scale + k * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              totals[k][r] = fma(to_floats(sums[k][r]), of_keys, totals[k][r]);
              sums[k][r] = IntVec{};
            }
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int k = 0; k < kKeyVectors<R>; ++k) {
        store(scores + r * kTileTokens + t + k * kLanes, kHasGroups<Codes> ? totals[k][r] : to_floats(sums[k][r]));
      }
    }
  }
}

// ---- both

inline void score_integers(const HeadRows& rows, const Cache& cache, const StoredTile& tile, const NextRows& next_rows,
                           const Scratch& scratch) {
  const int64_t bytes = row_bytes(cache), stride = integer_padded(cache.dim);
  prefetch_all_scales(next_rows);
  with_integers(cache.format, [&]<typename Codes>() {
    if constexpr (kHasGroups<Codes>) transpose_scales(cache, tile, scratch.key);
    [[maybe_unused]] Vec zero_points[kTokenVectors];
    if constexpr (Codes::kHasZeroPoints) load_zero_points(tile, zero_points);
    for_each_even_block<kMostBlockRows>(rows.count, [&]<int R>(int64_t row) {
      const RowAhead ahead = row == 0 ? rows_ahead(next_rows, tile) : RowAhead(tile);
      const int16_t* const query = rows.query_integers + row * stride;
      float* scores = rows.scores + row * kTileTokens;
      if (keys_in_lanes<Codes, R>(cache.dim)) {
        score_lanes_of<Codes, R>(tile, cache.dim, query, scratch.key, ahead, scores);
      } else if constexpr (!kHasGroups<Codes>) {
        score_integers_of<Codes, R>(tile, bytes, query, ahead, scores);
      }
      for (int r = 0; r < R; ++r, scores += kTileTokens) {
        const IntegerRow query = rows.integer_rows[row + r];
        for (int t = 0; t < kTileTokens; t += kLanes) {
          Vec score = load(scores + t);
          if constexpr (Codes::kHasZeroPoints) score = fma(zero_points[t / kLanes], splat(-query.sum), score);
          store(scores + t, score * query.unit);
        }
      }
    });
  });
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
