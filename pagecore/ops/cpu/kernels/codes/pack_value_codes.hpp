// Tiles of quantised values as panels of bfloat16 pairs (panels.hpp), straight from the codes: those of two tokens
// become the halves of a dword.
//
// Numbers have the bits that unpack.hpp gives them. Unused tokens become zeros and are not read.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/stored_tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512VBMI__)

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

inline void pack_value_codes(const Cache&, const StoredTile&, const NextRows&, uint32_t*) { __builtin_trap(); }

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
