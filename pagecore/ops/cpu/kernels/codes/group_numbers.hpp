// The scales of groups of 16 of a tile as float32, [groups, 64]: rows of bytes are transposed, eight groups at a time.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/integer_codes.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

// Groups whose scale bytes are transposed together.
constexpr int64_t kScaleBytes = 8;

// The numbers of kLanes scale bytes, the first of a vector.
template <Format kFormat>
PC_FORCE_INLINE Vec numbers_of_scales(__m128i bytes) {
#if defined(__AVX512F__)
  const auto words = (HalfVec)_mm256_cvtepi8_epi16(bytes);
  const auto codes = (IntVec)_mm512_maskz_cvtepu8_epi32(kAllLanes, bytes);
#else
  const auto words = (HalfVec)_mm_cvtepi8_epi16(bytes);
  const auto codes = (IntVec)_mm256_cvtepu8_epi32(bytes);
#endif
  if constexpr (kFormat == Format::NVFP4) {  // the bits of a float16 number that is 256 times as small
    return widen_f16((words << 7 & 0xbfff) | (HalfVec)((words & 0x7f) == 0x7f)) * 256.0f;
  }
  const IntVec least = splat_bits(0x00400000);  // 2^-127
  return (Vec)(max(codes << 23, least) | (IntVec)(codes == 255));
}

// The scale bytes of up to eight groups of a token.
PC_FORCE_INLINE int64_t scale_bytes(const char* row, int64_t count) {
  int64_t eight = 0;
  uint32_t four = 0;
  if (count < kScaleBytes) {
    __builtin_memcpy(&four, row, sizeof four);
    return four;
  }
  __builtin_memcpy(&eight, row, sizeof eight);
  return eight;
}

#if defined(__AVX512BW__)

struct WordOrder {
  alignas(64) uint16_t words[kWordLanes];
};

// The scale bytes of eight tokens, a group in each qword.
PC_FORCE_INLINE __m512i transpose_scale_bytes(__m512i tokens) {
  // Of two tokens, those of a group become a word; word 8 i + g then belongs to group g.
  static constexpr uint8_t kPairs[16] = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
  static constexpr auto kOrder = [] {
    WordOrder order{};
    for (int i = 0; i < kWordLanes; ++i) order.words[i] = static_cast<uint16_t>(i % 4 * 8 + i / 4);
    return order;
  }();
  const Bytes pairs = look_up((Bytes)tokens, repeat(kPairs));
  return _mm512_maskz_permutexvar_epi16(~__mmask32{0}, _mm512_load_si512(kOrder.words), (__m512i)pairs);
}

// Writes the numbers of `count` groups from `group` on.
template <Format kFormat>
PC_FORCE_INLINE void transpose_groups(const StoredTile& tile, int64_t group, int64_t count, bool runs, float* numbers) {
  const auto eight_tokens = [&](int t) __attribute__((always_inline)) {
    if (runs) return transpose_scale_bytes(_mm512_loadu_si512(tile.scales[t]));
    const auto of = [&](int i)
                        __attribute__((always_inline)) { return scale_bytes(tile.scales[t + i] + group, count); };
    return transpose_scale_bytes(_mm512_set_epi64(of(7), of(6), of(5), of(4), of(3), of(2), of(1), of(0)));
  };
  for (int t = 0; t < kTileTokens; t += kLanes) {
    const __m512i low = eight_tokens(t), high = eight_tokens(t + 8);
    const __m512i of_groups[2] = {_mm512_maskz_unpacklo_epi64(0xff, low, high),
                                  _mm512_maskz_unpackhi_epi64(0xff, low, high)};
    for_each_constant<kScaleBytes>([&]<int g>() __attribute__((always_inline)) {
      if (g >= count) return;
      const __m128i bytes = _mm512_maskz_extracti32x4_epi32(0xf, of_groups[g % 2], g / 2);
      store(numbers + g * kTileTokens + t, numbers_of_scales<kFormat>(bytes));
    });
  }
}

PC_FORCE_INLINE bool have_runs(const StoredTile& tile, int64_t groups) {
  return groups == kScaleBytes && are_runs(tile.scale_addresses(), groups);
}

#else

// Writes the numbers of `count` groups from `group` on.
template <Format kFormat>
PC_FORCE_INLINE void transpose_groups(const StoredTile& tile, int64_t group, int64_t count, bool, float* numbers) {
  for (int t = 0; t < kTileTokens; t += kLanes) {
    __m128i row[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) row[i] = _mm_cvtsi64_si128(scale_bytes(tile.scales[t + i] + group, count));
    const __m128i a = _mm_unpacklo_epi8(row[0], row[1]), b = _mm_unpacklo_epi8(row[2], row[3]);
    const __m128i c = _mm_unpacklo_epi8(row[4], row[5]), d = _mm_unpacklo_epi8(row[6], row[7]);
    const __m128i ab[2] = {_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)};
    const __m128i cd[2] = {_mm_unpacklo_epi16(c, d), _mm_unpackhi_epi16(c, d)};
    float* to = numbers + t;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i, to += 4 * kTileTokens) {
      if (4 * i >= count) break;
      const __m128i first = _mm_unpacklo_epi32(ab[i], cd[i]), second = _mm_unpackhi_epi32(ab[i], cd[i]);
      store(to, numbers_of_scales<kFormat>(first));
      store(to + kTileTokens, numbers_of_scales<kFormat>(_mm_unpackhi_epi64(first, first)));
      store(to + 2 * kTileTokens, numbers_of_scales<kFormat>(second));
      store(to + 3 * kTileTokens, numbers_of_scales<kFormat>(_mm_unpackhi_epi64(second, second)));
    }
  }
}

PC_FORCE_INLINE bool have_runs(const StoredTile&, int64_t) { return false; }

#endif

// Writes the scales of groups of 16 as numbers, [groups, 64].
inline void transpose_scales(const Cache& cache, const StoredTile& tile, float* numbers) {
  const int64_t groups = cache.dim / 16;
  const bool runs = have_runs(tile, groups);
  for (int64_t g = 0; g < groups; g += kScaleBytes) {
    const int64_t count = groups - g < kScaleBytes ? groups - g : kScaleBytes;
    float* const to = numbers + g * kTileTokens;
    if (cache.format == Format::NVFP4) {
      transpose_groups<Format::NVFP4>(tile, g, count, runs, to);
    } else {
      transpose_groups<Format::FP4Block16>(tile, g, count, runs, to);
    }
  }
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
