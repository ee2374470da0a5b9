// Weights of query rows times the scales of groups, as bfloat16.
//
//   powers of 2    2^(e - 127): the exponents of the weights become larger by 128 and then smaller by 255 - e; none is
//                  negative, and what would be less than the least number is 0
//   other scales   multiplied with float32 weights
#pragma once

#include "pagecore/ops/cpu/kernels/codes/group_scales.hpp"
#include "pagecore/ops/cpu/kernels/products/dot.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512BF16__)

// The scales of the groups of a tile, if there are any.
class GroupScales {
 public:
  // `memory` has room for [groups, 64] floats.
  PC_FORCE_INLINE GroupScales(const Cache& cache, const StoredTile& tile, float* memory)
      : tile_(tile), numbers_(memory), are_powers_(cache.format != Format::NVFP4) {
    const int64_t size = group_size(cache.format);
    if (!are_powers_) {
      expand_scales(cache, tile, memory);
    } else if (size != 0) {
      make_exponents(cache.dim / size);
    }
  }

  // Writes weights [count, 64] times the scales of a group. `pairs` are the weights as bfloat16.
  PC_FORCE_INLINE void scale(int64_t group, const float* weights, const uint16_t* pairs, int64_t count,
                             uint16_t* to) const {
    if (!are_powers_) return multiply(numbers_ + group * kTileTokens, weights, count, to);
    const uint16_t* const exponents = words() + group * kTileTokens;
    const Words low = load_words(exponents), high = load_words(exponents + kWordLanes);
    for (int64_t i = 0; i < count * kTileTokens; i += kTileTokens) {
      store_words(to + i, scaled(load_words(pairs + i), low));
      store_words(to + i + kWordLanes, scaled(load_words(pairs + i + kWordLanes), high));
    }
    if (has_nan_) [[unlikely]]
      put_nan(group, count, to);
  }

 private:
  static constexpr uint16_t kBias = 128 << 7;  // the lowest bit of the exponent of bfloat16 is bit 7

  [[nodiscard]] uint16_t* words() const { return reinterpret_cast<uint16_t*>(numbers_); }

  PC_FORCE_INLINE static Words load_words(const uint16_t* p) { return (Words)load_pairs(p); }
  // A weight of 0 stays 0 with any scale.
  PC_FORCE_INLINE static Words scaled(Words weights, Words exponents) {
    const __mmask32 positive = _mm512_test_epi16_mask((__m512i)weights, (__m512i)weights);
    return (Words)_mm512_maskz_subs_epu16(positive, (__m512i)(weights + kBias), (__m512i)exponents);
  }

  // Writes 255 minus the exponents of a tile as exponents of bfloat16, [groups, 64].
  PC_FORCE_INLINE void make_exponents(int64_t groups) {
    Bytes most{};
    int64_t g = 0;
    const auto put = [&](const Vec(&rows)[kTileDwords], int64_t count) __attribute__((always_inline)) {
      for (const Vec row : rows) most = (Bytes)_mm512_maskz_max_epu8(~__mmask64{0}, (__m512i)most, (__m512i)row);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        if (i >= count) break;
        uint16_t* const to = words() + (g + i) * kTileTokens;
        store_words(to, exponents_of(rows[0], rows[1], i));
        store_words(to + kWordLanes, exponents_of(rows[2], rows[3], i));
      }
    };
    Vec rows[2][kTileDwords];
    for (; g + 8 <= groups; g += 4) {
      load_eight_scales(tile_, g, rows[0], rows[1]);
      put(rows[0], 4);
      g += 4;
      put(rows[1], 4);
    }
    for (; g < groups; g += 4) {
      const int64_t count = groups - g < 4 ? groups - g : 4;
      load_four_scales(tile_, g, count, rows[0]);
      put(rows[0], count);
    }
    has_nan_ = _mm512_cmpeq_epi8_mask((__m512i)most, _mm512_set1_epi8(-1)) != 0;
  }
  // Of the bytes i of dwords of 16 tokens, and of the next 16.
  PC_FORCE_INLINE static Words exponents_of(Vec first, Vec second, int i) {
    const auto of = [&](Vec v) __attribute__((always_inline)) {
      return (__m512i)(~(i == 0 ? (BitVec)v << 7 : (BitVec)v >> (8 * i - 7)) & 0x7f80);
    };
    const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    const __m512i words = _mm512_maskz_packus_epi32(~__mmask32{0}, of(first), of(second));
    return (Words)_mm512_maskz_permutexvar_epi64(0xff, order, words);
  }

  // The weights of tokens whose scale is NaN.
  [[gnu::noinline]] void put_nan(int64_t group, int64_t count, uint16_t* to) const {
    for (int t = 0; t < kTileTokens; ++t) {
      if (static_cast<uint8_t>(tile_.scales[t][group]) != 255) continue;
      for (int64_t r = 0; r < count; ++r) to[r * kTileTokens + t] = 0x7fc0;
    }
  }

  PC_FORCE_INLINE static void multiply(const float* scales, const float* weights, int64_t count, uint16_t* to) {
    Vec of_tokens[kTileDwords];
#pragma GCC unroll 4
    for (int i = 0; i < kTileDwords; ++i) of_tokens[i] = load(scales + i * kLanes);
    for (int64_t r = 0; r < count; ++r, weights += kTileTokens, to += kTileTokens) {
#pragma GCC unroll 2
      for (int i = 0; i < kTileDwords; i += 2) {
        const Vec a = load(weights + i * kLanes) * of_tokens[i];
        const Vec b = load(weights + (i + 1) * kLanes) * of_tokens[i + 1];
        store_words(to + i * kLanes, (Words)_mm512_maskz_cvtne2ps_pbh(~__mmask32{0}, (__m512)b, (__m512)a));
      }
    }
  }

  const StoredTile& tile_;
  float* const numbers_;
  const bool are_powers_;
  bool has_nan_ = false;
};

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
