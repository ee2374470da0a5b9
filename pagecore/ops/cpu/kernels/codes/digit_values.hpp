// Weights of few query rows times values from their codes, by exact products of int8 on AMX.
//
//   left    [digits of 8 rows][64 tokens]     weights
//   right   [16 x 4 tokens][16 dims]          codes of four tokens in turn
#pragma once

#include "pagecore/ops/cpu/kernels/codes/digit_scores.hpp"
#include "pagecore/ops/cpu/kernels/codes/weight_ranges.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX)

// The digits of the weights of a tile, [16, 64], and what a sum of a row means.
struct WeightDigits {
  int8_t* digits;
  float units[kCodeRows];
  float excess[kCodeRows];  // sum of weights times zero points
};

// Numbers that are made from 4 x 64 stored bytes.
template <typename Codes>
constexpr int64_t kChunk = Codes::kParts * kByteDepth;

// ---- weights

// Writes the digits of the weights. Returns false if a row has none.
template <typename Codes>
inline bool write_digits(const HeadRows& rows, const StoredTile& tile, WeightDigits& made) {
  [[maybe_unused]] Vec zero_points[kTileDwords];
  if constexpr (Codes::kHasZeroPoints) load_zero_points(tile, zero_points);
  for (int64_t r = 0; r < rows.count; ++r) {
    const float* const row = rows.scores + r * kTileTokens;
    float factor;
    if (!weight_factor(row, kLargestDigits, factor, made.units[r])) return false;
    IntVec integers[kTileDwords];
    [[maybe_unused]] Vec excess{};
#pragma GCC unroll 4
    for (int i = 0; i < kTileDwords; ++i) {
      integers[i] = nearest(load(row + i * kLanes) * factor);
      if constexpr (Codes::kHasZeroPoints) excess = fma(to_floats(integers[i]), zero_points[i], excess);
    }
    if constexpr (Codes::kHasZeroPoints) made.excess[r] = sum(excess);
    int8_t* const digits = made.digits + r * kTileTokens;
    store_digits(integers, digits, digits + kLowDigits * kTileTokens);
  }
  return true;
}

// ---- values

template <int kHalf>
PC_FORCE_INLINE Bytes zip_bytes(Bytes a, Bytes b) {
  return (Bytes)(kHalf == 0 ? zip_low(a, b) : zip_high(a, b));
}

// Bytes of four rows in turn: quarter q of vector n has the bytes 16 q + 4 n .. + 4.
PC_FORCE_INLINE void zip_rows(const Bytes (&rows)[4], Bytes (&zipped)[4]) {
  const Bytes a = zip_bytes<0>(rows[0], rows[1]), b = zip_bytes<0>(rows[2], rows[3]);
  const Bytes c = zip_bytes<1>(rows[0], rows[1]), d = zip_bytes<1>(rows[2], rows[3]);
  zipped[0] = zip_words<0>(a, b), zipped[1] = zip_words<1>(a, b);
  zipped[2] = zip_words<0>(c, d), zipped[3] = zip_words<1>(c, d);
}

// The codes of a group of 16 dims of four tokens: quarter `kQuarter` of two vectors of zip_rows(), the low nibbles of
// the first, its high nibbles, and those of the second.
template <int kQuarter>
PC_FORCE_INLINE Bytes group_codes(Bytes a, Bytes b) {
  const auto both = (Words)_mm512_maskz_shuffle_i32x4(kAllLanes, (__m512i)a, (__m512i)b, kQuarter * 0x55);
  const Words shifts = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
  return (Bytes)_mm512_maskz_srlv_epi16(~__mmask32{0}, (__m512i)both, (__m512i)shifts);
}

// Writes a chunk of values from dim d on to a panel [16, kChunk], four tokens a row.
template <typename Codes>
PC_FORCE_INLINE void pack_chunk(const Codes& codes, const StoredTile& tile, int64_t d, int64_t dim, int64_t rows_ahead,
                                StreamsAhead& ahead, uint32_t* panel) {
  const auto put = [&](uint32_t* to, Bytes bytes)
                       __attribute__((always_inline)) { _mm512_store_si512(to, (__m512i)bytes); };
  const int64_t at = d / Codes::kParts, bytes = dim / Codes::kParts - at;
  for (int q = 0; q < kTileTokens / 4; ++q) {
    Bytes rows[4], zipped[4];
    ahead.prefetch(rows_ahead);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) rows[i] = load_stored(tile.codes[4 * q + i] + at, bytes);
    zip_rows(rows, zipped);
    uint32_t* const to = panel + dword_of_tokens(q) * kChunk<Codes>;
    if constexpr (Codes::kParts == 1) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) put(to + n * kAmxColumns, zipped[n]);
    } else {
      for_each_constant<4>([&]<int quarter>() __attribute__((always_inline)) {
        uint32_t* const of_quarter = to + 2 * quarter * kAmxColumns;
        put(of_quarter, codes.of_low_nibbles(group_codes<quarter>(zipped[0], zipped[1])));
        put(of_quarter + kAmxColumns, codes.of_low_nibbles(group_codes<quarter>(zipped[2], zipped[3])));
      });
    }
  }
}

// Writes all values, chunk by chunk, and prefetches about half of the next rows.
template <typename Codes>
inline void pack_panel(const StoredTile& tile, int64_t dim, StreamsAhead& ahead, uint32_t* panel) {
  constexpr int64_t kWidth = kChunk<Codes>;
  const Codes codes;
  const int64_t rows_ahead = dim <= kWidth ? 2 : 1;
  for (int64_t d = 0; d < dim; d += kWidth) {
    pack_chunk(codes, tile, d, dim, d < 2 * kWidth ? rows_ahead : 0, ahead, panel + d * kAmxRows);
  }
}

// ---- sums

// The sums of 64 dims from a panel of chunks, [16, 64].
template <typename Codes>
PC_FORCE_INLINE void multiply_panel(const WeightDigits& weights, const uint32_t* panel, float* sums) {
  Amx::load<kLeftTile>(weights.digits, kTileTokens);
  for_each_constant<4>([&]<int n>() __attribute__((always_inline)) {
    constexpr int kRight = kRightTile + n % 2;
    Amx::load<kRight>(panel + n * kAmxColumns, 4 * kChunk<Codes>);
    Amx::zero<n>();
    Amx::multiply_bytes<n, kLeftTile, kRight>();
    Amx::store<n>(sums + n * kAmxColumns, 4 * kByteDepth);
  });
}

// Four vectors of sums in the order of the dims.
template <typename Codes>
PC_FORCE_INLINE void order_columns(Vec (&v)[4]) {
  if constexpr (Codes::kParts == 1) {
    transpose_quarters(v[0], v[1], v[2], v[3], v);
  } else {
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      v[n] = __builtin_shufflevector(v[n], v[n], 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    }
  }
}

// Adds the sums of 64 dims from d on.
template <typename Codes>
PC_FORCE_INLINE void add_panel(const HeadRows& rows, const WeightDigits& weights, int64_t d, const float* sums) {
  for (int64_t r = 0; r < rows.count; ++r, sums += kByteDepth) {
    Vec v[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const float* const high = sums + n * kAmxColumns;
      v[n] = join_digits(load(high), load(high + kLowDigits * kByteDepth));
    }
    order_columns<Codes>(v);
    float* const acc = rows.acc + r * rows.acc_stride + d;
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      if constexpr (Codes::kHasZeroPoints) v[n] = v[n] - weights.excess[r];
      add_product(acc + n * kLanes, v[n] * weights.units[r], rows.factor + r);
    }
  }
}

template <typename Codes>
inline bool accumulate_digits_of(const HeadRows& rows, int64_t dim, const StoredTile& tile, const NextRows& next_rows,
                                 const Scratch& scratch) {
  WeightDigits weights;
  weights.digits = reinterpret_cast<int8_t*>(scratch.value);
  if (!write_digits<Codes>(rows, tile, weights)) return false;
  auto* const panel = reinterpret_cast<uint32_t*>(scratch.value + kAmxRows * kTileTokens / 4);
  prefetch_all_scales(next_rows);
  StreamsAhead ahead(next_rows);
  pack_panel<Codes>(tile, dim, ahead, panel);
  alignas(64) float sums[2][kAmxRows * kByteDepth];
  const int64_t parts = dim / kByteDepth;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t d = part * kByteDepth, start = d / kChunk<Codes> * kChunk<Codes>;
    ahead.prefetch_part(2 * (parts - part));
    multiply_panel<Codes>(weights, panel + start * kAmxRows + d - start, sums[part % 2]);
    ahead.prefetch_part(2 * (parts - part) - 1);
    if (part > 0) add_panel<Codes>(rows, weights, d - kByteDepth, sums[1 - part % 2]);
  }
  add_panel<Codes>(rows, weights, dim - kByteDepth, sums[1 - parts % 2]);
  return true;
}

// Adds the products of all rows, which attend to the same keys. Returns false, having added nothing, if the weights
// cannot be integers.
inline bool accumulate_digits(AmxTiles& tiles, const HeadRows& rows, const Cache& cache, const StoredTile& tile,
                              const NextRows& next_rows, const Scratch& scratch) {
  tiles.set_rows(kAmxRows);
  return with_digits(cache.format, [&]<typename Codes>() {
    return accumulate_digits_of<Codes>(rows, cache.dim, tile, next_rows, scratch);
  });
}

// True if query rows are multiplied with the codes of a cache as digits.
PC_FORCE_INLINE bool has_digits(const Cache& cache, int64_t rows) {
  return has_integers(cache) && group_size(cache.format) == 0 && rows <= kCodeRows;
}

#else

PC_FORCE_INLINE bool has_digits(const Cache&, int64_t) { return false; }
inline bool pack_query_digits(const uint16_t*, int64_t, int64_t, const Cache&, uint32_t*, IntegerRow*) {
  __builtin_trap();
}
inline void score_digits(AmxTiles&, const HeadRows&, const uint32_t*, const Cache&, const StoredTile&, const NextRows&,
                         const Scratch&) {
  __builtin_trap();
}
inline bool accumulate_digits(AmxTiles&, const HeadRows&, const Cache&, const StoredTile&, const NextRows&,
                              const Scratch&) {
  __builtin_trap();
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
