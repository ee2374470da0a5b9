// Scores of few query rows from the codes of keys, by exact products of int8 on AMX.
//
//   int8   sums [16 tokens][digits of 8 rows] = codes . digits of the queries     codes are read in place
//   int4   the same, of codes that are unpacked to bytes
//
// Of 64 numbers of 4-bit codes, those with even index come first.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/code_pairs.hpp"
#include "pagecore/ops/cpu/kernels/codes/digits.hpp"
#include "pagecore/ops/cpu/kernels/products/packed.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX)

// Numbers in a row of an AMX tile.
constexpr int64_t kByteDepth = kAmxRowBytes;
// Query rows whose sums are joined at once.
constexpr int64_t kJoinedRows = 4;

// Calls visit.operator()<Codes>() for the codes of a format.
template <typename Visit>
PC_FORCE_INLINE auto with_digits(Format format, Visit&& visit) {
  if (format == Format::I8Token) return visit.template operator()<Int8Integers>();
  return visit.template operator()<Int4Integers>();
}

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

// Writes the digits of 64 integers to the columns of row `r` in a part of a panel, [16, 16].
PC_FORCE_INLINE void put_digits(const IntVec (&integers)[4], int64_t r, uint32_t* panel) {
  alignas(64) uint32_t digits[2][kAmxRows];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    store_low_bytes(digits[0] + 4 * i, (integers[i] + 128) >> 8);
    store_low_bytes(digits[1] + 4 * i, integers[i]);
  }
  for (int digit = 0; digit < 2; ++digit) {
    for (int64_t k = 0; k < kAmxRows; ++k) {
      panel[k * kAmxColumns + digit * kLowDigits + r] = digits[digit][k];
    }
  }
}

template <typename Codes>
inline bool pack_digits_of(const uint16_t* rows, int64_t stride, int64_t count, int64_t dim, uint32_t* panel,
                           IntegerRow* of_rows) {
  Vec numbers[4];
  IntVec integers[4];
  for (int64_t r = 0; r < count; ++r, rows += stride) {
    IntVec bits{}, sums{};
    for (int64_t d = 0; d < dim; d += kLanes) {
      bits = max(bits, (IntVec)widen_bf16(load_half(rows + d)) & kMagnitudeBits);
    }
    float factor;
    if (!integer_factor(max_of_lanes(bits)[0], factor, of_rows[r].unit, kLargestDigits)) return false;
    for (int64_t d = 0; d < dim; d += kByteDepth) {
      load_ordered<Codes>(rows + d, numbers);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        integers[i] = nearest(numbers[i] * factor);
        sums += integers[i];
      }
      put_digits(integers, r, panel + d / 4 * kAmxColumns);
    }
    of_rows[r].sum = sum(to_floats(sums));
  }
  return true;
}

// Packs the digits of bfloat16 query rows. Returns false if a row has none.
inline bool pack_query_digits(const uint16_t* rows, int64_t stride, int64_t count, const Cache& cache, uint32_t* panel,
                              IntegerRow* of_rows) {
  return with_digits(cache.format, [&]<typename Codes>() {
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
PC_FORCE_INLINE void join_columns(const float* sums, Vec (&of_rows)[kJoinedRows]) {
#pragma GCC unroll 4
  for (int i = 0; i < kJoinedRows; ++i) {
    const float* const from = sums + i * kAmxColumns;
    of_rows[i] = join_digits(load_quarters(from, 4 * kAmxColumns), load_quarters(from + kLowDigits, 4 * kAmxColumns));
  }
  transpose_squares(of_rows);
}

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
  for (int64_t row = 0; row < rows.count; row += kJoinedRows) {
#pragma GCC unroll 4
    for (int t = 0; t < kTileTokens; t += kLanes) {
      Vec of_rows[kJoinedRows];
      ahead.prefetch(kLanes / 2);
      join_columns(sums[t] + row, of_rows);
#pragma GCC unroll 4
      for (int64_t r = 0; r < kJoinedRows; ++r) {
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

// Scores of all rows, whose digits pack_query_digits() has packed.
inline void score_digits(AmxTiles& tiles, const HeadRows& rows, const uint32_t* panel, const Cache& cache,
                         const StoredTile& tile, const NextRows& next_rows, const Scratch& scratch) {
  tiles.set_rows(kAmxRows);
  prefetch_all_scales(next_rows);
  auto* const copies = reinterpret_cast<char*>(scratch.unpacked);
  with_digits(cache.format,
              [&]<typename Codes>() { score_digits_of<Codes>(rows, panel, tile, next_rows, cache.dim, copies); });
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
