// The scales of a tile of a quantised cache, as vectors of dwords.
//
// Where the scales of 16 tokens are contiguous, those of a tile are loaded as vectors: copies of single scales, loaded
// as vectors soon after they are stored, wait for all these stores. Tiles that are read in place are visited as four
// streams of two tokens (tile.hpp), and their scales are put in that order:
//
//   loaded    stream 0: t0 t1 .. t15   stream 1: t16 t17 ..   stream 2: t32 ..   stream 3: t48 ..
//   in order  t0 t1 t16 t17 t32 t33 t48 t49 t2 t3 t18 ..
#pragma once

#include "pagecore/ops/cpu/kernels/simd/transpose.hpp"
#include "pagecore/ops/cpu/kernels/tiles/prefetch.hpp"
#include "pagecore/ops/cpu/kernels/tiles/tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// An address or an offset; reads those that were stored as pointers.
typedef int64_t Address __attribute__((may_alias));

#if defined(__AVX512BW__)

constexpr int kTileDwords = kTileTokens / kLanes;

// True if the rows of `bytes` bytes at these addresses are four streams of two, each of 16 contiguous rows.
PC_FORCE_INLINE bool are_streams(const Address* addresses, int64_t bytes) {
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

// True if the rows of `bytes` bytes at these addresses are four runs of 16 contiguous rows, in order.
PC_FORCE_INLINE bool are_runs(const Address* addresses, int64_t bytes) {
  const __m512i steps = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(bytes));
  const __m512i eight = _mm512_set1_epi64(8 * bytes);
  __mmask8 same = 0xff;
#pragma GCC unroll 4
  for (int i = 0; i < kTileTokens; i += kLanes) {
    const __m512i expected = _mm512_add_epi64(_mm512_set1_epi64(addresses[i]), steps);
    same &= _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(addresses + i), expected);
    same &= _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(addresses + i + 8), _mm512_add_epi64(expected, eight));
  }
  return same == 0xff;
}

// Loads rows of a dword each, 16 rows a vector. `base` is added to the addresses.
PC_FORCE_INLINE void load_dword_rows(const Address* addresses, int64_t base, Vec (&rows)[kTileDwords]) {
  if (are_runs(addresses, 4)) {
#pragma GCC unroll 4
    for (int i = 0; i < kTileDwords; ++i) rows[i] = load_at(base + addresses[i * kLanes]);
    return;
  }
  if (are_streams(addresses, 4)) {
    const Vec a = load_at(base + addresses[0]), b = load_at(base + addresses[2]);
    const Vec c = load_at(base + addresses[4]), d = load_at(base + addresses[6]);
    return transpose_quarters(low_pairs(a, b), low_pairs(c, d), high_pairs(a, b), high_pairs(c, d), rows);
  }
  alignas(64) float copies[kTileTokens];
  for (int t = 0; t < kTileTokens; ++t) {
    __builtin_memcpy(copies + t, reinterpret_cast<const char*>(base + addresses[t]), sizeof(float));
  }
#pragma GCC unroll 4
  for (int i = 0; i < kTileDwords; ++i) rows[i] = load(copies + i * kLanes);
}

// Copies rows of `bytes` bytes, an even number, to [64, bytes].
PC_FORCE_INLINE void copy_rows(const char* const* rows, int64_t bytes, char* to) {
  for (int t = 0; t < kTileTokens; ++t, to += bytes) {
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) __builtin_memcpy(to + i, rows[t] + i, 8);
    for (; i < bytes; i += 2) __builtin_memcpy(to + i, rows[t] + i, 2);
  }
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
