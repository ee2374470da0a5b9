// 4-bit codes as bfloat16, by lookups in tables of 16 numbers; the number with the even index is in the low nibble.
#pragma once

#include "pagecore/ops/cpu/code_tables.hpp"
#include "pagecore/ops/cpu/kernels/simd/bytes.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Numbers that share a table.
constexpr int64_t kNibbleGroup = 16;

#if defined(__AVX512BW__)

PC_FORCE_INLINE __m512i join(const CodeTable& first, const CodeTable& second) {
  const __m512i low = _mm512_castsi256_si512(*reinterpret_cast<const __m256i*>(first.words));
  return _mm512_maskz_inserti64x4(0xff, low, *reinterpret_cast<const __m256i*>(second.words), 1);
}

// Unpacks 16 bytes of codes of two groups. The index of a word is its nibble; bit 4 selects the second table.
PC_FORCE_INLINE Words unpack_two_groups(__m128i pairs, __m512i tables) {
  const BitVec second = {0,        0,        0,        0,        0,        0,        0,        0,
                         0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010};
  const auto wide = (BitVec)_mm512_maskz_cvtepu8_epi32(kAllLanes, pairs);
  const BitVec index = ((wide | (wide << 12)) & 0x000f000f) | second;
  return (Words)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)index, tables);
}

// Unpacks `bytes` bytes of codes. table(g) is the table of numbers 16 g .. 16 g + 15.
template <typename TableOf>
PC_FORCE_INLINE void unpack_nibbles(const char* codes, int64_t bytes, TableOf&& table, uint16_t* to) {
  int64_t at = 0;
  for (; at + kLanes <= bytes; at += kLanes) {
    const int64_t group = 2 * at / kNibbleGroup;
    store_words(to + 2 * at, unpack_two_groups(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + at)),
                                               join(table(group), table(group + 1))));
  }
  if (at == bytes) return;
  const int64_t left = bytes - at, group = 2 * at / kNibbleGroup;
  const __m128i pairs = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1 << left) - 1), codes + at);
  store_words(to + 2 * at, unpack_two_groups(pairs, join(table(group), table(left > kLanes / 2 ? group + 1 : group))));
}

#else

PC_FORCE_INLINE void store_nibbles(uint64_t pairs, const CodeTable& table, uint16_t* to) {
  typedef uint64_t Long2 __attribute__((vector_size(16)));
  const Long2 both = {pairs, 0};
#if defined(__x86_64__)
  const __m128i wide = _mm_cvtepu8_epi16((__m128i)both);
  const __m128i index = _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)), _mm_set1_epi8(15));
  const __m128i low = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table.low)), index);
  const __m128i high = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table.high)), index);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi8(low, high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), _mm_unpackhi_epi8(low, high));
#else
  const uint8x8_t bytes = vget_low_u8((uint8x16_t)both);
  const uint8x16_t index = vcombine_u8(vzip1_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)),
                                       vzip2_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)));
  const uint8x16_t low = vqtbl1q_u8(vld1q_u8(table.low), index), high = vqtbl1q_u8(vld1q_u8(table.high), index);
  vst1q_u8(reinterpret_cast<uint8_t*>(to), vzip1q_u8(low, high));
  vst1q_u8(reinterpret_cast<uint8_t*>(to + 8), vzip2q_u8(low, high));
#endif
}

#if defined(__AVX2__)
// Unpacks 16 bytes of codes of two groups.
PC_FORCE_INLINE void store_two_groups(const char* codes, const CodeTable& first, const CodeTable& second,
                                      uint16_t* to) {
  const auto both = [](const uint8_t* a, const uint8_t* b) __attribute__((always_inline)) {
    const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
    return _mm256_inserti128_si256(low, _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1);
  };
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i index = _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15));
  const __m256i low = _mm256_shuffle_epi8(both(first.low, second.low), index);
  const __m256i high = _mm256_shuffle_epi8(both(first.high, second.high), index);
  const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute2x128_si256(a, b, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kNibbleGroup), _mm256_permute2x128_si256(a, b, 0x31));
}
#endif

// Unpacks `bytes` bytes of codes. table(g) is the table of numbers 16 g .. 16 g + 15.
template <typename TableOf>
PC_FORCE_INLINE void unpack_nibbles(const char* codes, int64_t bytes, TableOf&& table, uint16_t* to) {
  constexpr int64_t kBytes = kNibbleGroup / 2;
  int64_t at = 0;
#if defined(__AVX2__)
  for (; at + 2 * kBytes <= bytes; at += 2 * kBytes) {
    store_two_groups(codes + at, table(at / kBytes), table(at / kBytes + 1), to + 2 * at);
  }
#endif
  uint64_t pairs = 0;
  for (; at + kBytes <= bytes; at += kBytes) {
    __builtin_memcpy(&pairs, codes + at, kBytes);
    store_nibbles(pairs, table(at / kBytes), to + 2 * at);
  }
  if (at == bytes) return;
  pairs = 0;
  __builtin_memcpy(&pairs, codes + at, static_cast<size_t>(bytes - at));
  store_nibbles(pairs, table(at / kBytes), to + 2 * at);
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
