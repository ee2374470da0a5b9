// Scales of groups of a tile as float32, a vector at a time.
#pragma once

#include "pagecore/ops/cpu/kernels/stored_tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512VBMI__)

// Numbers that share a scale; 0 for formats without scales of groups.
PC_FORCE_INLINE int64_t group_size(Format format) {
  return format == Format::MXFP8 ? 32 : format == Format::FP4Block16 || format == Format::NVFP4 ? 16 : 0;
}

// 2^(byte - 127) as bfloat16; NaN for 255.
PC_FORCE_INLINE BytePair ue8m0_bytes(Bytes codes) {
  const Bytes least_or_nan = codes + 1 <= 1 ? Bytes{} + 0x40 : Bytes{};
  return {(Bytes)((Words)codes << 7 & 0x8080) | least_or_nan, (Bytes)((Words)codes >> 1) & 0x7f};
}

// Four bytes of 64 tokens, `at` bytes into their rows of scales, one token a dword; `count` of them, others are 0.
PC_FORCE_INLINE void gather_scales(const StoredTile& tile, int64_t at, int64_t count, uint32_t (&dwords)[kTileTokens]) {
  if (count >= 4) {
    for (int t = 0; t < kTileTokens; ++t) __builtin_memcpy(&dwords[t], tile.scales[t] + at, 4);
    return;
  }
  for (int t = 0; t < kTileTokens; ++t) {
    uint16_t both;
    __builtin_memcpy(&both, tile.scales[t] + at, 2);
    dwords[t] = both;
  }
}

// Writes the numbers [count, 64] of up to four scales of each token, from dwords of 16 tokens.
template <typename BytesOf>
PC_FORCE_INLINE void store_numbers(const Vec (&dwords)[kTileDwords], int64_t count, float* numbers,
                                   BytesOf&& bytes_of) {
  // Of the bytes {low, high} of dwords: 0, 0, byte g of low, byte g of high.
  constexpr __mmask64 kHighWords = 0xcccccccccccccccc;
  const BitVec dword_starts = {0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
  const BitVec first = dword_starts << 16 | (dword_starts + 64) << 24;
#pragma GCC unroll 4
  for (int t = 0; t < kTileDwords; ++t) {
    const BytePair bytes = bytes_of((Bytes)dwords[t]);
    for (int i = 0; i < count; ++i) {
      const auto index = (__m512i)(first + static_cast<uint32_t>(i) * 0x01010000);
      store(numbers + i * kTileTokens + t * kLanes,
            (Vec)_mm512_maskz_permutex2var_epi8(kHighWords, (__m512i)bytes.low, index, (__m512i)bytes.high));
    }
  }
}

// Writes numbers [groups, 64] of a tile whose rows have `groups` scales, an even number.
template <typename BytesOf>
PC_FORCE_INLINE void expand_scales(const StoredTile& tile, int64_t groups, float* numbers, BytesOf&& bytes_of) {
  Vec first[kTileDwords], second[kTileDwords];
  if (groups == 4 && load_streams(tile.scale_addresses(), 0, first)) return store_numbers(first, 4, numbers, bytes_of);
  if (groups == 8 && load_wide_streams(tile.scale_addresses(), first, second)) {
    store_numbers(first, 4, numbers, bytes_of);
    return store_numbers(second, 4, numbers + 4 * kTileTokens, bytes_of);
  }
  alignas(64) uint32_t dwords[kTileTokens];
  for (int64_t g = 0; g < groups; g += 4) {
    gather_scales(tile, g, groups - g, dwords);
    for (int t = 0; t < kTileDwords; ++t) first[t] = (Vec) * reinterpret_cast<const BitVec*>(dwords + t * kLanes);
    store_numbers(first, groups - g < 4 ? groups - g : 4, numbers + g * kTileTokens, bytes_of);
  }
}

inline void expand_scales(const Cache& cache, const StoredTile& tile, float* numbers) {
  const int64_t groups = cache.dim / group_size(cache.format);
  if (cache.format == Format::NVFP4) {
    const Float8Unpacker<E4M3Code> unpacker;
    expand_scales(tile, groups, numbers,
                  [&](Bytes codes) __attribute__((always_inline)) { return unpacker.bytes_of(codes); });
  } else {
    expand_scales(tile, groups, numbers, [](Bytes codes) __attribute__((always_inline)) { return ue8m0_bytes(codes); });
  }
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
