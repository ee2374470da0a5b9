// Tiles of quantised keys and values as panels of bfloat16 pairs (panels.hpp), straight from the codes.
//
//   keys     16 rows x 16 dwords of codes are transposed, so that a lane is a token; then codes become pairs of numbers
//   values   the codes of two tokens become the halves of a dword
//
// Numbers have the bits that unpack.hpp gives them. Unused tokens become zeros and are not read.
#pragma once

#include "pagecore/ops/cpu/kernels/panels.hpp"
#include "pagecore/ops/cpu/kernels/unpack.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// A tile of stored rows: the codes and the scales of each token. Those of a token that must not be read are `zeros`.
struct StoredTile {
  const CodeTables& tables;
  const float* numbers;  // of the scale bytes of groups
  const char* codes[kTileTokens];
  const char* scales[kTileTokens];
};

inline void fill_rows(const TokenRows& tokens, const TileUse& use, const char* zeros,
                      const char* (&rows)[kTileTokens]) {
  const char* const base = tokens.base;
  if (base == nullptr) return;
  for (int t = 0; t < kTileTokens; ++t) rows[t] = base + tokens.offsets[t];
  if (use.used == nullptr && use.first == 0 && use.last == kTileTokens) return;
  for (int t = 0; t < kTileTokens; ++t) {
    const bool used = t >= use.first && t < use.last && (use.used == nullptr || use.used[t] != 0);
    if (!used) rows[t] = zeros;
  }
}

inline void fill_tile(const TokenRows& codes, const TokenRows& scales, const TileUse& use, const char* zeros,
                      StoredTile& tile) {
  fill_rows(codes, use, zeros, tile.codes);
  fill_rows(scales, use, zeros, tile.scales);
}

#if defined(__AVX512VBMI__)

// True if tiles of a format and dim are packed here.
PC_FORCE_INLINE bool packs_codes(const Cache& cache) { return !is_plain(cache) && cache.dim % 64 == 0; }

PC_FORCE_INLINE Words scaled(Words words, Vec even, Vec odd) {
  return high_halves(even_floats(words) * even, odd_floats(words) * odd);
}

// ---- scales of groups

// The scales of a tile for up to eight groups, transposed. Loaded for all tokens before any is used, because a vector
// that is loaded soon after its lanes were stored waits for all these stores.
class TileScales {
 public:
  static constexpr int64_t kGroups = 8;

  PC_FORCE_INLINE void load(const StoredTile& tile, int64_t first, int64_t groups) {
    const float* const numbers = tile.numbers;
    for (int t = 0; t < kTileTokens; ++t) {
      const auto* row = reinterpret_cast<const uint8_t*>(tile.scales[t]) + first;
      for (int64_t g = 0; g < groups; ++g) numbers_[g][t] = numbers[row[g]];
    }
  }
  PC_FORCE_INLINE Vec of(int64_t group, int first) const {
    return ::pagecore::cpu::PC_ISA::load(numbers_[group] + first);
  }

 private:
  alignas(64) float numbers_[kGroups][kTileTokens];
};

// ---- keys

// Loads the dwords of 16 rows from byte `at` on, 16 or 8 of each, and transposes them.
PC_FORCE_INLINE void load_square(const char* const* rows, int64_t at, int dwords, Vec (&square)[kLanes]) {
  const auto part = static_cast<__mmask16>(dwords == kLanes ? 0xffff : 0xff);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) square[i] = (Vec)_mm512_maskz_loadu_epi32(part, rows[i] + at);
  transpose(square);
}

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
    struct { alignas(64) uint8_t at[64]; } order{};
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
  const BitVec low = dwords >> (8 * kPair);
  return (low & 0xffff) | ((low << 12) & 0xffff0000);
}

// int4: indices of the numbers -15 .. 15, shifted by 15 minus the zero point.
struct Int4Lookup {
  __m512i table;
  PC_FORCE_INLINE explicit Int4Lookup(const CodeTables& tables) : table(_mm512_load_si512(tables.integers)) {}
  PC_FORCE_INLINE Words of(BitVec index, BitVec offset) const {
    const BitVec shifted = (index & 0x000f000f) + offset;
    return (Words)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)shifted, table);
  }
};

struct E2M1Lookup {
  __m512i table;
  PC_FORCE_INLINE explicit E2M1Lookup(const CodeTables& tables) : table(join(tables.ue8m0[127], tables.ue8m0[127])) {}
  PC_FORCE_INLINE Words of(BitVec index) const {
    return (Words)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)index, table);
  }
};

PC_FORCE_INLINE uint32_t int4_offset(const char* scale) {
  uint32_t bits;
  __builtin_memcpy(&bits, scale, sizeof bits);
  return (15 - (bits & 15)) * 0x10001;
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

// ---- values

// Factors of the numbers d .. d + 15 of two tokens.
struct PairScales {
  Vec even, odd;
};

PC_FORCE_INLINE PairScales pair_scales(const float* numbers, const char* first, const char* second, int64_t group) {
  const auto number = [&](const char* row) __attribute__((always_inline)) {
    return splat(numbers[reinterpret_cast<const uint8_t*>(row)[group]]);
  };
  return {number(first), number(second)};
}

PC_FORCE_INLINE Words unpack_low_words(Words a, Words b) {
  return (Words)_mm512_maskz_unpacklo_epi16(~__mmask32{0}, (__m512i)a, (__m512i)b);
}
PC_FORCE_INLINE Words unpack_high_words(Words a, Words b) {
  return (Words)_mm512_maskz_unpackhi_epi16(~__mmask32{0}, (__m512i)a, (__m512i)b);
}

template <typename Unpacker, bool kScaled>
void pack_value_bytes(const Cache& cache, const StoredTile& tile, const NextRows& ahead, uint32_t* panel) {
  const NextRows next_rows = ahead;
  const int64_t dim = cache.dim;
  const Unpacker unpacker;
  // Dword 4 k + i becomes dword k of lane i, so that interleaving within lanes gives the natural order.
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  for (int t = 0; t < kTileTokens; t += 2) {
    prefetch_row(next_rows, t);
    prefetch_row(next_rows, t + 1);
    for (int64_t d = 0; d < dim; d += 64) {
      Bytes low[2], high[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512i codes = _mm512_loadu_si512(tile.codes[t + i] + d);
        const auto parts = unpacker.bytes_of((Bytes)_mm512_maskz_permutexvar_epi32(kAllLanes, order, codes));
        low[i] = parts.low, high[i] = parts.high;
      }
      const Words a = zip_low(low[0], high[0]), b = zip_low(low[1], high[1]);
      const Words c = zip_high(low[0], high[0]), e = zip_high(low[1], high[1]);
      Words pairs[4] = {unpack_low_words(a, b), unpack_high_words(a, b), unpack_low_words(c, e),
                        unpack_high_words(c, e)};
      auto* to = reinterpret_cast<float*>(panel + t / 2 * dim + d);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        if constexpr (kScaled) {
          const auto [even, odd] = pair_scales(tile.numbers, tile.scales[t], tile.scales[t + 1], d / 32 + k / 2);
          pairs[k] = scaled(pairs[k], even, odd);
        }
        store(to + k * kLanes, (Vec)pairs[k]);
      }
    }
  }
}

// The codes of 32 numbers of two tokens: a byte of each in a dword, in an order that interleave() makes natural.
PC_FORCE_INLINE BitVec nibbles_of_two(const char* first, const char* second, int64_t at) {
  const __m128i order = _mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0);
  const auto wide = [&](const char* row) __attribute__((always_inline)) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + at));
    return (BitVec)_mm512_maskz_cvtepu8_epi32(kAllLanes, _mm_shuffle_epi8(bytes, order));
  };
  return wide(first) | (wide(second) << 16);
}

// Stores the numbers with even and with odd index in natural order.
template <typename Scale>
PC_FORCE_INLINE void store_interleaved(Words even, Words odd, uint32_t* panel, Scale&& scale) {
  auto* to = reinterpret_cast<float*>(panel);
  store(to, (Vec)scale(0, (Words)zip_low((Vec)even, (Vec)odd)));
  store(to + kLanes, (Vec)scale(1, (Words)zip_high((Vec)even, (Vec)odd)));
}

inline void pack_value_int4(const Cache& cache, const StoredTile& tile, const NextRows& ahead, uint32_t* panel) {
  const NextRows next_rows = ahead;
  const int64_t dim = cache.dim;
  const Int4Lookup lookup(tile.tables);
  for (int t = 0; t < kTileTokens; t += 2) {
    prefetch_row(next_rows, t);
    prefetch_row(next_rows, t + 1);
    const uint32_t low = int4_offset(tile.scales[t]), high = int4_offset(tile.scales[t + 1]);
    const BitVec offset = BitVec{} + ((low & 0xffff) | (high & 0xffff0000));
    for (int64_t d = 0; d < dim; d += 32) {
      const BitVec codes = nibbles_of_two(tile.codes[t], tile.codes[t + 1], d / 2);
      store_interleaved(lookup.of(codes, offset), lookup.of(codes >> 4, offset), panel + t / 2 * dim + d,
                        [](int, Words words) __attribute__((always_inline)) { return words; });
    }
  }
}

inline void pack_value_e2m1(const Cache& cache, const StoredTile& tile, const NextRows& ahead, uint32_t* panel) {
  const NextRows next_rows = ahead;
  const int64_t dim = cache.dim;
  const E2M1Lookup lookup(tile.tables);
  for (int t = 0; t < kTileTokens; t += 2) {
    prefetch_row(next_rows, t);
    prefetch_row(next_rows, t + 1);
    for (int64_t d = 0; d < dim; d += 32) {
      const BitVec codes = nibbles_of_two(tile.codes[t], tile.codes[t + 1], d / 2);
      store_interleaved(lookup.of(codes), lookup.of(codes >> 4), panel + t / 2 * dim + d,
                        [&](int half, Words words) __attribute__((always_inline)) {
                          const auto [even, odd] =
                              pair_scales(tile.numbers, tile.scales[t], tile.scales[t + 1], d / 16 + half);
                          return scaled(words, even, odd);
                        });
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

inline void pack_value_codes(const Cache& cache, const StoredTile& tile, const NextRows& next_rows, uint32_t* panel) {
  switch (cache.format) {
    case Format::Plain: break;
    case Format::E4M3:
    case Format::E4M3Token: return pack_value_bytes<Float8Unpacker<E4M3Code>, false>(cache, tile, next_rows, panel);
    case Format::E5M2: return pack_value_bytes<Float8Unpacker<E5M2Code>, false>(cache, tile, next_rows, panel);
    case Format::MXFP8: return pack_value_bytes<Float8Unpacker<E4M3Code>, true>(cache, tile, next_rows, panel);
    case Format::I8Token: return pack_value_bytes<Int8Unpacker, false>(cache, tile, next_rows, panel);
    case Format::I4Token: return pack_value_int4(cache, tile, next_rows, panel);
    case Format::FP4Block16:
    case Format::NVFP4: return pack_value_e2m1(cache, tile, next_rows, panel);
  }
}

#else

PC_FORCE_INLINE bool packs_codes(const Cache&) { return false; }
inline void pack_key_codes(const Cache&, const StoredTile&, const NextRows&, uint32_t*) { __builtin_trap(); }
inline void pack_value_codes(const Cache&, const StoredTile&, const NextRows&, uint32_t*) { __builtin_trap(); }

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
