// Scores of few query rows from the codes of keys, by exact products of int8 on AMX.
//
//   int8   sums [16 tokens][digits of 8 rows] = codes . digits of the queries     codes are read in place
//   int4   the same, of codes that are unpacked to bytes
//   e2m1   sums [16 tokens][4 groups x 4 rows], for each 64 dims and each of the two digits: a column has the digits of
//          the dims of one group, and 0 for the others. The scales of groups multiply the sums in float32.
//
// Of 64 numbers of 4-bit codes, those with even index come first.
#pragma once

#include "pagecore/ops/cpu/kernels/code_scores.hpp"
#include "pagecore/ops/cpu/kernels/digits.hpp"
#include "pagecore/ops/cpu/kernels/packed.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX)

// Numbers in a row of an AMX tile.
constexpr int64_t kByteDepth = kAmxRowBytes;
constexpr int kTileNumbers = kAmxRows * static_cast<int>(kAmxColumns);
constexpr int kRuns = static_cast<int>(kTileTokens) / kAmxRows;
// Query rows that e2m1 has columns for.
constexpr int64_t kGroupRows = 4;

// ---- queries

// 64 bfloat16 numbers in the order of the codes of keys.
template <typename Codes>
PC_FORCE_INLINE void load_ordered(const uint16_t* from, Vec (&numbers)[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if constexpr (Codes::kParts == 1) {
      numbers[i] = widen_bf16(load_half(from + i * kLanes));
    } else {
      const auto pairs = (Words)load_pairs(from + i % 2 * kPairLanes);
      numbers[i] = i < 2 ? even_floats(pairs) : odd_floats(pairs);
    }
  }
}

PC_FORCE_INLINE void store_low_bytes(uint32_t* to, IntVec v) {
  _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(kAllLanes, (__m512i)v));
}

// Writes the digits of 64 integers to the columns of row `r` in a part of a panel: [16, 16] for 64 dims, or for e2m1
// [2 digits, 16, 16], whose other columns are 0.
template <typename Codes>
PC_FORCE_INLINE void put_digits(const IntVec (&integers)[4], int64_t r, uint32_t* panel) {
  alignas(64) uint32_t digits[2][kAmxRows];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    store_low_bytes(digits[0] + 4 * i, (integers[i] + 128) >> 8);
    store_low_bytes(digits[1] + 4 * i, integers[i]);
  }
  for (int digit = 0; digit < 2; ++digit) {
    for (int64_t k = 0; k < kAmxRows; ++k) {
      if constexpr (Codes::kGroup == 0) {
        panel[k * kAmxColumns + digit * kLowDigits + r] = digits[digit][k];
      } else {
        panel[digit * kTileNumbers + k * kAmxColumns + k % 8 / 2 * kGroupRows + r] = digits[digit][k];
      }
    }
  }
}

template <typename Codes>
inline bool pack_digits_of(const uint16_t* rows, int64_t stride, int64_t count, int64_t dim, uint32_t* panel,
                           IntegerRow* of_rows) {
  const int64_t part = kTileNumbers * (Codes::kGroup == 0 ? 1 : 2);
  if constexpr (Codes::kGroup != 0) {
    __builtin_memset(panel, 0, static_cast<size_t>(dim / kByteDepth * part) * sizeof *panel);
  }
  Vec numbers[4];
  IntVec integers[4];
  for (int64_t r = 0; r < count; ++r, rows += stride) {
    IntVec bits{}, sums{};
    for (int64_t d = 0; d < dim; d += kLanes) {
      bits = max(bits, (IntVec)widen_bf16(load_half(rows + d)) & kMagnitudeBits);
    }
    float factor;
    if (!integer_factor(largest_of_lanes(bits), factor, of_rows[r].unit, kLargestDigits)) return false;
    for (int64_t d = 0; d < dim; d += kByteDepth) {
      load_ordered<Codes>(rows + d, numbers);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        integers[i] = nearest(numbers[i] * factor);
        sums += integers[i];
      }
      put_digits<Codes>(integers, r, panel + d / kByteDepth * part);
    }
    of_rows[r].unit *= Codes::kUnit;
    of_rows[r].sum = sum(to_floats(sums));
  }
  return true;
}

// Packs the digits of bfloat16 query rows. Returns false if a row has none.
inline bool pack_query_digits(const uint16_t* rows, int64_t stride, int64_t count, const Cache& cache, uint32_t* panel,
                              IntegerRow* of_rows) {
  return with_integers(cache.format, [&]<typename Codes>() {
    return pack_digits_of<Codes>(rows, stride, count, cache.dim, panel, of_rows);
  });
}

// ---- keys

// Sixteen rows of bytes from the token `begin` on. 4-bit codes, and rows at uneven distances, are written to `copy`.
template <typename Codes>
PC_FORCE_INLINE KeyRows byte_rows(const Codes& codes, const StoredTile& tile, int begin, int64_t dim, char* copy) {
  const char* const* const rows = tile.codes + begin;
  if constexpr (Codes::kParts == 1) {
    const int64_t stride = rows[1] - rows[0];
    bool straight = true;
    for (int i = 2; i < kAmxRows; ++i) straight = straight && rows[i] == rows[0] + i * stride;
    if (straight) return {rows[0], stride};
    for (int i = 0; i < kAmxRows; ++i) __builtin_memcpy(copy + i * dim, rows[i], static_cast<size_t>(dim));
  } else {
    for (int i = 0; i < kAmxRows; ++i) {
      for (int64_t d = 0; d < dim; d += kByteDepth) {
        const Bytes numbers = codes.of_low_nibbles(nibble_halves(rows[i] + d / 2));
        _mm512_store_si512(copy + i * dim + d, (__m512i)numbers);
      }
    }
  }
  return {copy, dim};
}

// ---- scores

// The sums of the digits of four rows from 16 rows of sums, as a vector of 16 tokens a row.
PC_FORCE_INLINE void join_columns(const float* sums, Vec (&of_rows)[kGroupRows]) {
#pragma GCC unroll 4
  for (int i = 0; i < kGroupRows; ++i) {
    const float* const from = sums + i * kAmxColumns;
    of_rows[i] = join_digits(load_quarters(from, 4 * kAmxColumns), load_quarters(from + kLowDigits, 4 * kAmxColumns));
  }
  transpose_squares(of_rows);
}

// Scores of codes without scales of groups.
template <typename Codes>
inline void score_digits_of(const HeadRows& rows, const uint32_t* panel, const StoredTile& tile,
                            const NextRows& next_rows, int64_t dim, char* copies) {
  const Codes codes;
  StreamsAhead ahead(next_rows);
  alignas(64) float sums[kTileTokens][kAmxColumns];
  KeyRows keys[kRuns];
  const auto multiply = [&]<int g>() __attribute__((always_inline)) {
    constexpr int kLeft = kLeftTile + g % 2, kRight = kRightTile + g % 2;
    ahead.prefetch(kAmxRows / 2);
    Amx::zero<g>();
    for (int64_t d = 0; d < dim; d += kByteDepth) {
      Amx::load<kRight>(panel + d / 4 * kAmxColumns, kAmxRowBytes);
      Amx::load<kLeft>(keys[g].first + d, keys[g].stride);
      Amx::multiply_bytes<g, kLeft, kRight>();
    }
    Amx::store<g>(sums[g * kAmxRows], kAmxRowBytes);
  };
  // A tile waits for the stores of its rows: those of the next one come first.
  for_each_constant<kRuns>([&]<int g>() __attribute__((always_inline)) {
    keys[g] = byte_rows(codes, tile, g * kAmxRows, dim, copies + g % 2 * kAmxRows * dim);
    if constexpr (g > 0) multiply.template operator()<g - 1>();
  });
  multiply.template operator()<kRuns - 1>();
  [[maybe_unused]] Vec zero_points[kTileDwords];
  if constexpr (Codes::kHasZeroPoints) load_zero_points(tile, zero_points);
  for (int64_t row = 0; row < rows.count; row += kGroupRows) {
#pragma GCC unroll 4
    for (int t = 0; t < kTileTokens; t += kLanes) {
      Vec of_rows[kGroupRows];
      ahead.prefetch(kLanes / 2);
      join_columns(sums[t] + row, of_rows);
#pragma GCC unroll 4
      for (int64_t r = 0; r < kGroupRows; ++r) {
        if (row + r == rows.count) break;
        const IntegerRow& query = rows.integer_rows[row + r];
        if constexpr (Codes::kHasZeroPoints) {
          of_rows[r] = fma(zero_points[t / kLanes], splat(-query.sum), of_rows[r]);
        }
        store(rows.scores + (row + r) * kTileTokens + t, of_rows[r] * query.unit);
      }
    }
  }
}

// The sums of 16 keys over each group of 64 dims, for 4 rows: [dim / 64, 2 digits, 16, 16].
inline void multiply_groups(const KeyRows& keys, const uint32_t* panel, int64_t dim, float* sums) {
  for (int64_t d = 0; d < dim; d += kByteDepth, panel += 2 * kTileNumbers, sums += 2 * kTileNumbers) {
    Amx::load<kLeftTile>(keys.first + d, keys.stride);
    for_each_constant<2>([&]<int digit>() __attribute__((always_inline)) {
      Amx::zero<digit>();
      Amx::load<kRightTile + digit>(panel + digit * kTileNumbers, kAmxRowBytes);
      Amx::multiply_bytes<digit, kLeftTile, kRightTile + digit>();
      Amx::store<digit>(sums + digit * kTileNumbers, kAmxRowBytes);
    });
  }
}

// Adds the sums of multiply_groups() times the scales [16, groups]: a vector of 16 tokens for each of 4 rows.
PC_FORCE_INLINE void add_groups(const float* sums, const uint16_t* scales, int64_t dim, Vec (&of_rows)[kGroupRows]) {
  const LaneScales<4> lanes;
  Vec of_tokens[kAmxRows] = {};
  for (int64_t d = 0; d < dim; d += kByteDepth, sums += 2 * kTileNumbers) {
#pragma GCC unroll 16
    for (int t = 0; t < kAmxRows; ++t) {
      const float* const from = sums + t * kAmxColumns;
      const Vec scale = lanes.of(scales + (t * dim + d) / 16);
      of_tokens[t] = fma(join_digits(load(from), load(from + kTileNumbers)), scale, of_tokens[t]);
    }
  }
  const auto add_quarters = [](Vec a, Vec b)
                                __attribute__((always_inline)) { return even_quarters(a, b) + odd_quarters(a, b); };
#pragma GCC unroll 4
  for (int i = 0; i < kGroupRows; ++i) {
    of_rows[i] =
        add_quarters(add_quarters(of_tokens[i], of_tokens[4 + i]), add_quarters(of_tokens[8 + i], of_tokens[12 + i]));
  }
  transpose_squares(of_rows);
}

// Scores of e2m1. Keys are unpacked a step before they are multiplied, and their sums are added a step later, so that
// products wait neither for stores nor for each other.
inline void score_groups(const HeadRows& rows, const uint32_t* panel, const Cache& cache, const StoredTile& tile,
                         const NextRows& next_rows, const Scratch& scratch) {
  const int64_t dim = cache.dim;
  const E2M1Integers codes;
  StreamsAhead ahead(next_rows);
  auto* const scales = reinterpret_cast<uint16_t*>(scratch.key);
  convert_scales(cache, tile, scales);
  KeyRows keys[kRuns];
  const auto unpack = [&](int run) {
    const int first = run * kAmxRows;
    ahead.prefetch(kAmxRows / 2);
    keys[run] =
        byte_rows(codes, tile, first, dim, reinterpret_cast<char*>(scratch.unpacked) + run % 2 * kAmxRows * dim);
  };
  const auto sums_of = [&](int run) { return scratch.key + (1 + run % 2) * 16 * dim; };
  const auto add = [&](int run) {
    const int64_t first = run * kAmxRows;
    Vec of_rows[kGroupRows];
    add_groups(sums_of(run), scales + first * dim / 16, dim, of_rows);
#pragma GCC unroll 4
    for (int64_t r = 0; r < kGroupRows; ++r) {
      if (r == rows.count) break;
      store(rows.scores + r * kTileTokens + first, of_rows[r] * rows.integer_rows[r].unit);
    }
  };
  unpack(0);
  for (int run = 0; run < kRuns; ++run) {
    if (run + 1 < kRuns) unpack(run + 1);
    ahead.prefetch(kAmxRows / 2);
    multiply_groups(keys[run], panel, dim, sums_of(run));
    if (run > 0) add(run - 1);
  }
  add(kRuns - 1);
}

// Scores of all rows, whose digits pack_query_digits() has packed.
inline void score_digits(AmxTiles& tiles, const HeadRows& rows, const uint32_t* panel, const Cache& cache,
                         const StoredTile& tile, const NextRows& next_rows, const Scratch& scratch) {
  tiles.set_rows(kAmxRows);
  prefetch_all_scales(next_rows);
  auto* const copies = reinterpret_cast<char*>(scratch.unpacked);
  switch (cache.format) {
    case Format::I8Token: return score_digits_of<Int8Integers>(rows, panel, tile, next_rows, cache.dim, copies);
    case Format::I4Token: return score_digits_of<Int4Integers>(rows, panel, tile, next_rows, cache.dim, copies);
    default: return score_groups(rows, panel, cache, tile, next_rows, scratch);
  }
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
