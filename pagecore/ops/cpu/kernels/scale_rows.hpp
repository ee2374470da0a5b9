// The scales of a tile of a quantised cache, as vectors of dwords.
//
// Whole tiles are visited as four streams of two tokens (tile.hpp). Where the scales of 16 tokens are contiguous, those
// of a tile are loaded as vectors and put in that order: copies of single scales, loaded as vectors soon after they are
// stored, wait for all these stores.
//
//   loaded    stream 0: t0 t1 .. t15   stream 1: t16 t17 ..   stream 2: t32 ..   stream 3: t48 ..
//   in order  t0 t1 t16 t17 t32 t33 t48 t49 t2 t3 t18 ..
#pragma once

#include "pagecore/ops/cpu/kernels/prefetch.hpp"
#include "pagecore/ops/cpu/kernels/tile.hpp"
#include "pagecore/ops/cpu/kernels/transpose.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512BW__)

constexpr int kTileDwords = kTileTokens / kLanes;

// True if the rows of `bytes` bytes at these addresses are four streams of two, each of 16 contiguous rows.
PC_FORCE_INLINE bool are_streams(const int64_t* addresses, int64_t bytes) {
  const __m512i first = _mm512_loadu_si512(addresses), twice = _mm512_set1_epi64(2 * bytes);
  // Odd places are one row after the even ones.
  const __m512i even = _mm512_maskz_permutex_epi64(0xff, first, 0xa0);
  __mmask8 same = _mm512_cmpeq_epi64_mask(first, _mm512_mask_add_epi64(even, 0xaa, even, _mm512_set1_epi64(bytes)));
  __m512i expected = first;
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) {
    expected = _mm512_add_epi64(expected, twice);
    same &= _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(addresses + 8 * i), expected);
  }
  return same == 0xff;
}

// Quarter i of four vectors, for each i.
PC_FORCE_INLINE void transpose_quarters(Vec a, Vec b, Vec c, Vec d, Vec (&out)[4]) {
  const Vec e = even_quarters(a, b), f = even_quarters(c, d), g = odd_quarters(a, b), h = odd_quarters(c, d);
  out[0] = even_quarters(e, f), out[1] = even_quarters(g, h), out[2] = odd_quarters(e, f), out[3] = odd_quarters(g, h);
}

PC_FORCE_INLINE Vec low_pairs(Vec a, Vec b) { return (Vec)_mm512_maskz_unpacklo_pd(0xff, (__m512d)a, (__m512d)b); }
PC_FORCE_INLINE Vec high_pairs(Vec a, Vec b) { return (Vec)_mm512_maskz_unpackhi_pd(0xff, (__m512d)a, (__m512d)b); }

PC_FORCE_INLINE Vec load_at(int64_t address) { return load(reinterpret_cast<const float*>(address)); }

// Loads rows of a dword each, 16 rows a vector, if are_streams(). `base` is added to the addresses.
PC_FORCE_INLINE bool load_streams(const int64_t* addresses, int64_t base, Vec (&rows)[kTileDwords]) {
  if (!are_streams(addresses, 4)) return false;
  const Vec a = load_at(base + addresses[0]), b = load_at(base + addresses[2]);
  const Vec c = load_at(base + addresses[4]), d = load_at(base + addresses[6]);
  transpose_quarters(low_pairs(a, b), low_pairs(c, d), high_pairs(a, b), high_pairs(c, d), rows);
  return true;
}

// The same for rows of two dwords, the first and the second.
PC_FORCE_INLINE bool load_wide_streams(const int64_t* addresses, Vec (&first)[kTileDwords],
                                       Vec (&second)[kTileDwords]) {
  if (!are_streams(addresses, 8)) return false;
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const auto part = [&](int stream)
                          __attribute__((always_inline)) { return load_at(addresses[2 * stream] + half * 4 * kLanes); };
    Vec rounds[4];
    transpose_quarters(part(0), part(1), part(2), part(3), rounds);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const auto a = (__m512i)rounds[2 * i], b = (__m512i)rounds[2 * i + 1];
      first[2 * half + i] = (Vec)_mm512_maskz_permutex2var_epi32(kAllLanes, a, even, b);
      second[2 * half + i] = (Vec)_mm512_maskz_permutex2var_epi32(kAllLanes, a, odd, b);
    }
  }
  return true;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
