// Tiles of quantised keys as panels of bfloat16 pairs (panels.hpp), straight from the codes: 16 rows x 16 dwords of
// codes are transposed, so that a lane is a token; then codes become pairs of numbers.
//
// Numbers have the bits that unpack.hpp gives them. Unused tokens become zeros and are not read.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/stored_tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512VBMI__)

PC_FORCE_INLINE void prefetch_square(const NextRows& next, int first, int64_t at) {
  if (next.rows.base == nullptr) return;
  for (int i = 0; i < kLanes; ++i) prefetch_line(next.rows.base + next.rows.offsets[first + i] + at);
  if (at > 0 || next.scales.base == nullptr) return;
  for (int i = 0; i < kLanes; ++i) prefetch_line(next.scales.base + next.scales.offsets[first + i]);
}

PC_FORCE_INLINE void store_pairs(uint32_t* panel, int64_t pair, int first, Words words) {
  store(reinterpret_cast<float*>(panel) + pair * kTileTokens + first, (Vec)words);
}

// The numbers 0, 1 (kFirst 0) or 2, 3 (kFirst 2) of each dword of four codes, from their low and high bytes.
template <int kFirst>
PC_FORCE_INLINE Words join_bytes(Bytes low, Bytes high) {
  constexpr auto kOrder = [] {
    struct {
      alignas(64) uint8_t at[64];
    } order{};
    for (int i = 0; i < 64; ++i) order.at[i] = static_cast<uint8_t>(i / 4 * 4 + kFirst + i % 4 / 2 + i % 2 * 64);
    return order;
  }();
  static constexpr auto kIndex = kOrder;
  return (Words)_mm512_maskz_permutex2var_epi8(~__mmask64{0}, (__m512i)low, _mm512_load_si512(kIndex.at),
                                               (__m512i)high);
}

template <typename Unpacker, bool kScaled>
void pack_key_bytes(const Cache& cache, const StoredTile& tile, const NextRows& ahead, uint32_t* panel) {
  const NextRows next_rows = ahead;
  const int64_t dim = cache.dim;
  const Unpacker unpacker;
  [[maybe_unused]] TileScales scales;
  for (int64_t d = 0; d < dim; d += 64) {
    if constexpr (kScaled) scales.load(tile, d / 32, 2);
    for (int t = 0; t < kTileTokens; t += kLanes) {
      prefetch_square(next_rows, t, d);
      Vec square[kLanes];
      load_square(tile.codes + t, d, kLanes, square);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        const auto [low, high] = unpacker.bytes_of((Bytes)square[j]);
        Words first = join_bytes<0>(low, high), second = join_bytes<2>(low, high);
        if constexpr (kScaled) {
          const Vec factor = scales.of(j / 8, t);
          first = scaled(first, factor, factor), second = scaled(second, factor, factor);
        }
        store_pairs(panel, d / 2 + 2 * j, t, first);
        store_pairs(panel, d / 2 + 2 * j + 1, t, second);
      }
    }
  }
}

// Nibbles 2 k and 2 k + 1 of each dword as the indices of a table of 32 words. Bit 4 of an index may be set.
template <int kPair>
PC_FORCE_INLINE BitVec nibble_pairs(BitVec dwords) {
  constexpr int64_t kFirst = 8 * kPair, kPlaces = kFirst | (kFirst + 4) << 16;
  const __m512i places = _mm512_set1_epi64(kPlaces | (kPlaces + 0x200020) << 32);  // bits of a quadword
  return (BitVec)_mm512_maskz_multishift_epi64_epi8(~__mmask64{0}, places, (__m512i)dwords);
}

inline void pack_key_int4(const Cache& cache, const StoredTile& tile, const NextRows& ahead, uint32_t* panel) {
  const NextRows next_rows = ahead;
  const int64_t dim = cache.dim;
  const Int4Lookup lookup(tile.tables);
  uint32_t offsets[kTileTokens];
  for (int t = 0; t < kTileTokens; ++t) offsets[t] = int4_offset(tile.scales[t]);
  for (int t = 0; t < kTileTokens; t += kLanes) {
    const auto offset = (BitVec)load_as_float<Float::F32>(offsets + t);
    for (int64_t d = 0; d < dim; d += 128) {
      prefetch_square(next_rows, t, d / 2);
      Vec square[kLanes];
      const int dwords = dim - d < 128 ? 8 : 16;
      load_square(tile.codes + t, d / 2, dwords, square);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        if (j >= dwords) break;
        const auto codes = (BitVec)square[j];
        store_pairs(panel, d / 2 + 4 * j, t, lookup.of(nibble_pairs<0>(codes), offset));
        store_pairs(panel, d / 2 + 4 * j + 1, t, lookup.of(nibble_pairs<1>(codes), offset));
        store_pairs(panel, d / 2 + 4 * j + 2, t, lookup.of(nibble_pairs<2>(codes), offset));
        store_pairs(panel, d / 2 + 4 * j + 3, t, lookup.of(nibble_pairs<3>(codes), offset));
      }
    }
  }
}

inline void pack_key_e2m1(const Cache& cache, const StoredTile& tile, const NextRows& ahead, uint32_t* panel) {
  const NextRows next_rows = ahead;
  const int64_t dim = cache.dim;
  const E2M1Lookup lookup(tile.tables);
  TileScales scales;
  for (int64_t d = 0; d < dim; d += 128) {
    const int dwords = dim - d < 128 ? 8 : 16;
    if (dwords == kLanes) {
      scales.load(tile, d / 16, 8);
    } else {
      scales.load(tile, d / 16, 4);
    }
    for (int t = 0; t < kTileTokens; t += kLanes) {
      prefetch_square(next_rows, t, d / 2);
      Vec square[kLanes];
      load_square(tile.codes + t, d / 2, dwords, square);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        if (j >= dwords) break;
        const auto codes = (BitVec)square[j];
        const Vec factor = scales.of(j / 2, t);
        store_pairs(panel, d / 2 + 4 * j, t, scaled(lookup.of(nibble_pairs<0>(codes)), factor, factor));
        store_pairs(panel, d / 2 + 4 * j + 1, t, scaled(lookup.of(nibble_pairs<1>(codes)), factor, factor));
        store_pairs(panel, d / 2 + 4 * j + 2, t, scaled(lookup.of(nibble_pairs<2>(codes)), factor, factor));
        store_pairs(panel, d / 2 + 4 * j + 3, t, scaled(lookup.of(nibble_pairs<3>(codes)), factor, factor));
      }
    }
  }
}

inline void pack_key_codes(const Cache& cache, const StoredTile& tile, const NextRows& next_rows, uint32_t* panel) {
  switch (cache.format) {
    case Format::Plain: break;
    case Format::E4M3:
    case Format::E4M3Token: return pack_key_bytes<Float8Unpacker<E4M3Code>, false>(cache, tile, next_rows, panel);
    case Format::E5M2: return pack_key_bytes<Float8Unpacker<E5M2Code>, false>(cache, tile, next_rows, panel);
    case Format::MXFP8: return pack_key_bytes<Float8Unpacker<E4M3Code>, true>(cache, tile, next_rows, panel);
    case Format::I8Token: return pack_key_bytes<Int8Unpacker, false>(cache, tile, next_rows, panel);
    case Format::I4Token: return pack_key_int4(cache, tile, next_rows, panel);
    case Format::FP4Block16:
    case Format::NVFP4: return pack_key_e2m1(cache, tile, next_rows, panel);
  }
}

#else

inline void pack_key_codes(const Cache&, const StoredTile&, const NextRows&, uint32_t*) { __builtin_trap(); }

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
