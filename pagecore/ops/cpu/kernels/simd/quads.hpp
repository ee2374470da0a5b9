// Quads: kByteLanes consecutive numbers of a row as four vectors, and the bytes of their codes.
//
// The vectors of bfloat16 hold the even and the odd numbers of each half of a quad: a shift or a mask widens them. The
// bytes of four vectors are packed within 16-byte parts, and in_order() moves them to the order of the numbers.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/bytes.hpp"
#include "pagecore/ops/cpu/kernels/simd/codes.hpp"
#include "pagecore/ops/cpu/kernels/simd/convert.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

PC_FORCE_INLINE Words load_words(const char* p) { return *reinterpret_cast<const LooseWords*>(p); }

// Words of the high halves of two vectors of dwords, in their order.
PC_FORCE_INLINE Words high_words(IntVec a, IntVec b) {
#if defined(__AVX512BW__)
  const __m512i order =
      _mm512_set_epi32(0x3f003d, 0x3b0039, 0x370035, 0x330031, 0x2f002d, 0x2b0029, 0x270025, 0x230021, 0x1f001d,
                       0x1b0019, 0x170015, 0x130011, 0x0f000d, 0x0b0009, 0x070005, 0x030001);
  return (Words)_mm512_maskz_permutex2var_epi16(~__mmask32{0}, (__m512i)a, order, (__m512i)b);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)((BitVec)a >> 16), (__m256i)((BitVec)b >> 16));
  return (Words)_mm256_permute4x64_epi64(packed, 0b11'01'10'00);
#elif defined(__x86_64__)
  return (Words)_mm_packus_epi32((__m128i)((BitVec)a >> 16), (__m128i)((BitVec)b >> 16));
#else
  return (Words)vuzp2q_u16((uint16x8_t)a, (uint16x8_t)b);
#endif
}

// The difference of the exponents of bfloat16 and float16, as a word of bfloat16.
constexpr uint16_t kHalfBias = 112 << 7;

// The magnitudes of a quad as words with the fraction bits of bfloat16, and words with the signs of the numbers, in
// order. Numbers with more bits are rounded to odd: one between two words becomes the one whose last bit is 1. So its
// order to numbers of seven bits remains. The words of bfloat16 and float32 are numbers of bfloat16. Those of float16
// have its exponent: they are numbers of bfloat16 less kHalfBias, and below 128 for subnormal numbers.
template <Float From>
PC_FORCE_INLINE void load_word_quad(const char* source, Words (&magnitudes)[2], Words (&signs)[2]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const char* from = source + half * kWordLanes * kSize<From>;
    if constexpr (From == Float::F32) {
      const auto odd = [=](int i) __attribute__((always_inline)) {
        const auto bits = (IntVec)load(reinterpret_cast<const float*>(from) + i * kLanes);
        return bits | ((bits & 0xffff) + 0xffff);  // changes the low half as well, which high_words() drops
      };
      signs[half] = high_words(odd(0), odd(1));
    } else {
      signs[half] = load_words(from);
    }
    magnitudes[half] = signs[half] & 0x7fff;
    if constexpr (From == Float::F16) magnitudes[half] = (magnitudes[half] | ((magnitudes[half] & 7) + 7)) >> 3;
  }
}

// Numbers of a row that a vector of a quad is taken from.
template <Float From>
constexpr int kSpan = From == Float::BF16 ? kWordLanes : kLanes;

// The number of a quad that lane 0 of vector `i` is taken from, or a number before it, in the same kSpan.
template <Float From>
constexpr int span_of(int i) {
  return From == Float::BF16 ? i / 2 * kWordLanes : i * kLanes;
}

template <Float From>
PC_FORCE_INLINE void load_quad(const char* source, Vec (&quad)[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const char* from = source + span_of<From>(i) * kSize<From>;
    if constexpr (From == Float::BF16) {
      quad[i] = i % 2 == 0 ? even_floats(load_words(from)) : odd_floats(load_words(from));
    } else {
      quad[i] = load_as_float<From>(from);
    }
  }
}

// One factor for each vector of a quad, from those of groups of kGroup numbers.
template <Float From, int kGroup>
PC_FORCE_INLINE Vec quad_factor(const float* factors, int i) {
  const float* first = factors + span_of<From>(i) / kGroup;
#if defined(__AVX512F__)
  if constexpr (kSpan<From> > kGroup) return blend(splat(first[0]), splat(first[1]), 0xff00);
#endif
  return splat(*first);
}

// Numbers of 16 bits, which are twice in each entry, of the groups of half a quad of bfloat16: one for each word.
template <int kGroup>
PC_FORCE_INLINE Words half_quad_words(const float* pairs, int half) {
  const float* first = pairs + half * kWordLanes / kGroup;
#if defined(__AVX512F__)
  if constexpr (kWordLanes > kGroup) return (Words)blend(splat(first[0]), splat(first[1]), 0xff00);
#endif
  return (Words)splat(*first);
}

// ---- packing

// Lanes whose bytes are packed: the low byte of lanes of bytes or of signed bytes, or byte kSumByte of lanes below
// 2^23.
enum class LaneRange { Unsigned, Signed, Sums };

#if defined(__AVX512BW__)
PC_FORCE_INLINE Words pack_dwords(IntVec a, IntVec b) {
  return (Words)_mm512_maskz_packs_epi32(~__mmask32{0}, (__m512i)a, (__m512i)b);
}
PC_FORCE_INLINE Bytes pack_signed(Words a, Words b) {
  return (Bytes)_mm512_maskz_packs_epi16(~__mmask64{0}, (__m512i)a, (__m512i)b);
}
PC_FORCE_INLINE Bytes pack_unsigned(Words a, Words b) {
  return (Bytes)_mm512_maskz_packus_epi16(~__mmask64{0}, (__m512i)a, (__m512i)b);
}
PC_FORCE_INLINE Words join_words(IntVec even, IntVec odd) {
  return (Words)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)even, (__m512i)(odd << 16));
}
#elif defined(__AVX2__)
PC_FORCE_INLINE Words pack_dwords(IntVec a, IntVec b) { return (Words)_mm256_packs_epi32((__m256i)a, (__m256i)b); }
PC_FORCE_INLINE Bytes pack_signed(Words a, Words b) { return (Bytes)_mm256_packs_epi16((__m256i)a, (__m256i)b); }
PC_FORCE_INLINE Bytes pack_unsigned(Words a, Words b) { return (Bytes)_mm256_packus_epi16((__m256i)a, (__m256i)b); }
PC_FORCE_INLINE Words join_words(IntVec even, IntVec odd) {
  return (Words)_mm256_blend_epi16((__m256i)even, (__m256i)(odd << 16), 0xaa);
}
#elif defined(__x86_64__)
PC_FORCE_INLINE Words pack_dwords(IntVec a, IntVec b) { return (Words)_mm_packs_epi32((__m128i)a, (__m128i)b); }
PC_FORCE_INLINE Bytes pack_signed(Words a, Words b) { return (Bytes)_mm_packs_epi16((__m128i)a, (__m128i)b); }
PC_FORCE_INLINE Bytes pack_unsigned(Words a, Words b) { return (Bytes)_mm_packus_epi16((__m128i)a, (__m128i)b); }
PC_FORCE_INLINE Words join_words(IntVec even, IntVec odd) {
  return (Words)_mm_blend_epi16((__m128i)even, (__m128i)(odd << 16), 0xaa);
}
#else
// Vectors of 16 bytes. What is packed is in range, or its sign alone is used.
PC_FORCE_INLINE Words pack_dwords(IntVec a, IntVec b) {
  const auto pack = [](IntVec v)
                        __attribute__((always_inline)) { return max(min(v, splat_bits(0x7fff)), splat_bits(-0x8000)); };
  return (Words)vuzp1q_u16((uint16x8_t)pack(a), (uint16x8_t)pack(b));
}
PC_FORCE_INLINE Bytes pack_signed(Words a, Words b) {
  return (Bytes)vcombine_s8(vqmovn_s16((int16x8_t)a), vqmovn_s16((int16x8_t)b));
}
PC_FORCE_INLINE Bytes pack_unsigned(Words a, Words b) {
  return (Bytes)vcombine_u8(vqmovun_s16((int16x8_t)a), vqmovun_s16((int16x8_t)b));
}
PC_FORCE_INLINE Words join_words(IntVec even, IntVec odd) { return (Words)((even & 0xffff) | odd << 16); }
#endif

template <Float From, LaneRange kRange>
PC_FORCE_INLINE Words low_words(IntVec a, IntVec b) {
  constexpr bool kCuts = kRange == LaneRange::Sums;
  if constexpr (From == Float::BF16) return kCuts ? join_words(a, b) >> 8 * kSumByte : join_words(a, b);
  return kCuts ? pack_dwords(a >> 8 * kSumByte, b >> 8 * kSumByte) & 0xff : pack_dwords(a, b);
}

#if defined(__AVX512VBMI__)
// The indices of bytes of two vectors of a quad: byte `at` of each lane, for the lower or the upper half of a vector.
template <Float From>
constexpr ByteTable64 pair_order(int at) {
  return table_64([=](int i) {
    const int pair = i % 32;
    return From == Float::BF16 ? pair / 2 * 4 + pair % 2 * 64 + at : pair * 4 + at;
  });
}

// Byte kAt of each lane, in the order of the numbers.
template <Float From, int kAt>
PC_FORCE_INLINE Bytes bytes_of_lanes(const IntVec (&lanes)[4]) {
  static constexpr ByteTable64 kOrder = pair_order<From>(kAt);
  constexpr __mmask64 kLower = 0xffffffff;
  const __m512i order = _mm512_load_si512(kOrder.bytes);
  return (Bytes)_mm512_maskz_permutex2var_epi8(kLower, (__m512i)lanes[0], order, (__m512i)lanes[1]) |
         (Bytes)_mm512_maskz_permutex2var_epi8(~kLower, (__m512i)lanes[2], order, (__m512i)lanes[3]);
}

template <Float From, LaneRange kRange>
PC_FORCE_INLINE Bytes low_bytes(const IntVec (&lanes)[4]) {
  return bytes_of_lanes<From, kRange == LaneRange::Sums ? kSumByte : 0>(lanes);
}

template <Float From>
PC_FORCE_INLINE Bytes in_order(Bytes bytes) {
  return bytes;
}
#else
// The low bytes of the lanes of a quad, or those of sums.
template <Float From, LaneRange kRange>
PC_FORCE_INLINE Bytes low_bytes(const IntVec (&lanes)[4]) {
  const Words a = low_words<From, kRange>(lanes[0], lanes[1]), b = low_words<From, kRange>(lanes[2], lanes[3]);
  return kRange == LaneRange::Signed ? pack_signed(a, b) : pack_unsigned(a, b);
}

// Packed bytes in the order of the numbers.
template <Float From>
PC_FORCE_INLINE Bytes in_order(Bytes bytes) {
#if defined(__AVX512BW__)
  if constexpr (From == Float::BF16) {
    return (Bytes)_mm512_maskz_permutexvar_epi64(0xff, _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), (__m512i)bytes);
  }
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  return (Bytes)_mm512_maskz_permutexvar_epi32(kAllLanes, order, (__m512i)bytes);
#elif defined(__AVX2__)
  if constexpr (From == Float::BF16) return (Bytes)_mm256_permute4x64_epi64((__m256i)bytes, 0b11'01'10'00);
  return (Bytes)_mm256_permutevar8x32_epi32((__m256i)bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#else
  return bytes;
#endif
}
#endif

// The low bytes of words of a quad of bfloat16, in the order of low_bytes(). Words are below 256.
PC_FORCE_INLINE Bytes narrow_words(Words a, Words b) {
#if defined(__AVX512VBMI__)
  static constexpr ByteTable64 kEven = table_64([](int i) { return 2 * i; });
  return (Bytes)_mm512_maskz_permutex2var_epi8(~__mmask64{0}, (__m512i)a, _mm512_load_si512(kEven.bytes), (__m512i)b);
#else
  return pack_unsigned(a, b);
#endif
}

// Bytes whose top bits are the signs of words, in the order of narrow_words(). Without kZeros, that of -0 is 0.
template <bool kZeros>
PC_FORCE_INLINE Bytes word_signs(Words a, Words b) {
  if (!kZeros) a &= a - 1, b &= b - 1;
#if defined(__AVX512VBMI__)
  static constexpr ByteTable64 kSigns = table_64([](int i) { return 2 * i + 1; });
  return (Bytes)_mm512_maskz_permutex2var_epi8(~__mmask64{0}, (__m512i)a, _mm512_load_si512(kSigns.bytes), (__m512i)b);
#else
  return pack_signed(a, b);
#endif
}

// Bytes whose top bits are the signs of a quad, in the order of low_bytes(). Without kZeros, that of -0 is 0.
template <Float From, bool kZeros>
PC_FORCE_INLINE Bytes quad_signs(const char* source) {
  if constexpr (From == Float::BF16) {
    return word_signs<kZeros>(load_words(source), load_words(source + kByteLanes));
  } else {
    Vec quad[4];
    IntVec bits[4];
    load_quad<From>(source, quad);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) bits[i] = kZeros ? (IntVec)quad[i] : (IntVec)((BitVec)quad[i] & ((BitVec)quad[i] - 1));
#if defined(__AVX512VBMI__)
    return bytes_of_lanes<From, 3>(bits);
#else
    return pack_signed(pack_dwords(bits[0], bits[1]), pack_dwords(bits[2], bits[3]));
#endif
  }
}

// ---- rows

// Pairs of codes, the first in the low nibble, as words.
PC_FORCE_INLINE Words nibble_pairs(Bytes codes) {
#if defined(__AVX512BW__)
  return (Words)_mm512_maskz_maddubs_epi16(~__mmask32{0}, (__m512i)codes, (__m512i)(Words{} + 0x1001));
#elif defined(__AVX2__)
  return (Words)_mm256_maddubs_epi16((__m256i)codes, (__m256i)(Words{} + 0x1001));
#elif defined(__SSSE3__)
  return (Words)_mm_maddubs_epi16((__m128i)codes, (__m128i)(Words{} + 0x1001));
#else
  return ((Words)codes & 0xff) | (Words)codes >> 4;
#endif
}

// Stores the codes of two quads, two in a byte.
PC_FORCE_INLINE void store_nibble_quads(char* p, Bytes a, Bytes b) {
  Bytes bytes = pack_unsigned(nibble_pairs(a), nibble_pairs(b));
#if defined(__AVX512BW__)
  bytes = (Bytes)_mm512_maskz_permutexvar_epi64(0xff, _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), (__m512i)bytes);
#elif defined(__AVX2__)
  bytes = (Bytes)_mm256_permute4x64_epi64((__m256i)bytes, 0b11'01'10'00);
#endif
  *reinterpret_cast<LooseBytes*>(p) = bytes;
}

// Stores the codes of a quad, two in a byte.
PC_FORCE_INLINE void store_nibble_quad(char* p, Bytes codes) {
  char both[kByteLanes];
  store_nibble_quads(both, codes, codes);
  __builtin_memcpy(p, both, kByteLanes / 2);
}

// Stores bytes_of(source, first), the codes of a quad in order, for all quads of a row. The last quad ends with the
// row, so that it may repeat numbers of the one before it; a row that is shorter than a quad is padded with zeros.
template <Float From, int kCodesPerByte, typename BytesOf>
PC_FORCE_INLINE void store_quads(const char* row, int64_t dim, char* codes, BytesOf&& bytes_of) {
  const auto at = [=](int64_t d) { return row + d * kSize<From>; };
  const auto put = [](char* to, Bytes bytes) __attribute__((always_inline)) {
    if constexpr (kCodesPerByte == 1) *reinterpret_cast<LooseBytes*>(to) = bytes;
    if constexpr (kCodesPerByte == 2) store_nibble_quad(to, bytes);
  };
  if (dim < kByteLanes) [[unlikely]] {
    if (dim <= 0) return;
    alignas(64) char padded[kByteLanes * kSize<From>] = {};
    char stored[kByteLanes];
    __builtin_memcpy(padded, row, static_cast<size_t>(dim * kSize<From>));
    put(stored, bytes_of(static_cast<const char*>(padded), int64_t{0}));
    __builtin_memcpy(codes, stored, static_cast<size_t>(dim / kCodesPerByte));
    return;
  }
  int64_t d = 0;
  if constexpr (kCodesPerByte == 2) {
    for (; d + 2 * kByteLanes <= dim; d += 2 * kByteLanes) {
      const Bytes first = bytes_of(at(d), d);
      store_nibble_quads(codes + d / 2, first, bytes_of(at(d + kByteLanes), d + kByteLanes));
    }
  }
  for (; d + kByteLanes <= dim; d += kByteLanes) put(codes + d / kCodesPerByte, bytes_of(at(d), d));
  if (d < dim) put(codes + (dim - kByteLanes) / kCodesPerByte, bytes_of(at(dim - kByteLanes), dim - kByteLanes));
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
