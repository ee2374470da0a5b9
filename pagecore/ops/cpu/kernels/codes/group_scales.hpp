// Scales of groups of a tile as float32 or bfloat16.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/stored_tile.hpp"
#include "pagecore/ops/cpu/kernels/simd/amx.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512BF16__)

// Numbers that share a scale; 0 for formats without scales of groups.
PC_FORCE_INLINE int64_t group_size(Format format) {
  return format == Format::MXFP8 ? 32 : format == Format::FP4Block16 || format == Format::NVFP4 ? 16 : 0;
}

// 2^(byte - 127) as bfloat16; NaN for 255.
PC_FORCE_INLINE BytePair ue8m0_bytes(Bytes codes) {
  const Bytes least_or_nan = codes + 1 <= 1 ? Bytes{} + 0x40 : Bytes{};
  return {(Bytes)((Words)codes << 7 & 0x8080) | least_or_nan, (Bytes)((Words)codes >> 1) & 0x7f};
}

// The scales of a tile as bfloat16, [64, groups]. `words` has room for half of these numbers more.
template <typename BytesOf>
PC_FORCE_INLINE void convert_scales(const StoredTile& tile, int64_t groups, uint16_t* words, BytesOf&& bytes_of) {
  const auto convert = [&](const char* bytes, int64_t count) __attribute__((always_inline)) {
    for (int64_t i = 0; i < count; i += kByteLanes, words += kByteLanes) {
      const BytePair numbers = bytes_of(spread((Bytes)_mm512_loadu_si512(bytes + i)));
      store_words(words, zip_low(numbers.low, numbers.high));
      store_words(words + kWordLanes, zip_high(numbers.low, numbers.high));
    }
  };
  if (groups * kLanes % kByteLanes == 0 && are_runs(tile.scale_addresses(), groups)) {
    for (int t = 0; t < kTileTokens; t += kLanes) convert(tile.scales[t], kLanes * groups);
    return;
  }
  char* const copies = reinterpret_cast<char*>(words + groups * kTileTokens);
  copy_rows(tile.scales, groups, copies);
  convert(copies, groups * kTileTokens);
}

inline void convert_scales(const Cache& cache, const StoredTile& tile, uint16_t* words) {
  const int64_t groups = cache.dim / group_size(cache.format);
  if (cache.format == Format::NVFP4) {
    const Float8Unpacker<E4M3Code> unpacker;
    convert_scales(tile, groups, words,
                   [&](Bytes codes) __attribute__((always_inline)) { return unpacker.bytes_of(codes); });
  } else {
    convert_scales(tile, groups, words, [](Bytes codes) __attribute__((always_inline)) { return ue8m0_bytes(codes); });
  }
}

// Picks the scale of each lane from those of kGroups groups, which share the lanes of a vector equally.
template <int kGroups>
class LaneScales {
 public:
  PC_FORCE_INLINE Vec of(const uint16_t* words) const {
    const __m512i repeated =
        _mm512_maskz_broadcast_i32x4(kAllLanes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
    return (Vec)_mm512_maskz_shuffle_epi8(~__mmask64{0}, repeated, order_);
  }

 private:
  static constexpr ByteTable64 kOrder = table_64([](int i) {
    const int group = i / 4 * kGroups / kLanes;
    return i % 4 < 2 ? 0x80 : 2 * group + i % 4 - 2;
  });

  const __m512i order_ = _mm512_load_si512(kOrder.bytes);
};

// Four bytes of the scales of 16 tokens a vector, `at` bytes into their rows; `count` of them, others mean nothing.
PC_FORCE_INLINE void load_four_scales(const StoredTile& tile, int64_t at, int64_t count, Vec (&rows)[kTileDwords]) {
  if (count >= 4) return load_dword_rows(tile.scale_addresses(), at, rows);
  alignas(64) uint32_t dwords[kTileTokens];
  for (int t = 0; t < kTileTokens; ++t) {
    uint16_t both;
    __builtin_memcpy(&both, tile.scales[t] + at, 2);
    dwords[t] = both;
  }
#pragma GCC unroll 4
  for (int i = 0; i < kTileDwords; ++i) rows[i] = (Vec) * reinterpret_cast<const BitVec*>(dwords + i * kLanes);
}

// Eight bytes of the scales of 16 tokens, `at` bytes into their rows, as two vectors of four each.
PC_FORCE_INLINE void load_eight_scales(const StoredTile& tile, int64_t at, Vec (&low)[kTileDwords],
                                       Vec (&high)[kTileDwords]) {
  alignas(64) char copies[8 * kTileTokens];
  const bool runs = are_runs(tile.scale_addresses(), 8);
  if (!runs) {
    for (int t = 0; t < kTileTokens; ++t) __builtin_memcpy(copies + 8 * t, tile.scales[t] + at, 8);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kTileDwords; ++i) {
    const char* const from = runs ? tile.scales[i * kLanes] + at : copies + 8 * i * kLanes;
    const auto* const pairs = reinterpret_cast<const float*>(from);
    const Vec a = load(pairs), b = load(pairs + kLanes);
    low[i] = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    high[i] = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  }
}

// Writes the scales of up to four groups, bytes of `rows`, as float32 [count, 64].
template <typename BytesOf>
PC_FORCE_INLINE void expand_four(const Vec (&rows)[kTileDwords], int64_t count, float* numbers, BytesOf&& bytes_of) {
  // Of the bytes {low, high} of dwords: 0, 0, byte g of low, byte g of high.
  constexpr __mmask64 kHighWords = 0xcccccccccccccccc;
  const BitVec dword_starts = {0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
  const BitVec first = dword_starts << 16 | (dword_starts + 64) << 24;
#pragma GCC unroll 4
  for (int t = 0; t < kTileDwords; ++t) {
    const BytePair bytes = bytes_of((Bytes)rows[t]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if (i >= count) break;
      const auto index = (__m512i)(first + static_cast<uint32_t>(i) * 0x01010000);
      store(numbers + i * kTileTokens + t * kLanes,
            (Vec)_mm512_maskz_permutex2var_epi8(kHighWords, (__m512i)bytes.low, index, (__m512i)bytes.high));
    }
  }
}

// Writes the scales of a tile as float32, [groups, 64]; `groups` is even.
template <typename BytesOf>
PC_FORCE_INLINE void expand_scales(const StoredTile& tile, int64_t groups, float* numbers, BytesOf&& bytes_of) {
  int64_t g = 0;
  Vec rows[2][kTileDwords];
  for (; g + 8 <= groups; g += 8, numbers += 8 * kTileTokens) {
    load_eight_scales(tile, g, rows[0], rows[1]);
    expand_four(rows[0], 4, numbers, bytes_of);
    expand_four(rows[1], 4, numbers + 4 * kTileTokens, bytes_of);
  }
  for (; g < groups; g += 4, numbers += 4 * kTileTokens) {
    const int64_t count = groups - g < 4 ? groups - g : 4;
    load_four_scales(tile, g, count, rows[0]);
    expand_four(rows[0], count, numbers, bytes_of);
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
