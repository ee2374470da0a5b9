// Vectors of bytes and of 16-bit words: minima and maxima, lookups in tables of 16 to 128 entries, and widening.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/vec.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr int kByteLanes = 4 * kLanes;  // bytes of a vector
constexpr int kWordLanes = 2 * kLanes;  // words of a vector

typedef uint8_t Bytes __attribute__((vector_size(kByteLanes)));
typedef uint16_t Words __attribute__((vector_size(kByteLanes)));
typedef uint8_t LooseBytes __attribute__((vector_size(kByteLanes), aligned(1), may_alias));
typedef uint16_t LooseWords __attribute__((vector_size(kByteLanes), aligned(1), may_alias));

PC_FORCE_INLINE Words max(Words a, Words b) {
#if defined(__AVX512BW__)
  return (Words)_mm512_maskz_max_epu16(~__mmask32{0}, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Words)_mm256_max_epu16((__m256i)a, (__m256i)b);
#elif defined(__SSE4_1__)
  return (Words)_mm_max_epu16((__m128i)a, (__m128i)b);
#else
  return a > b ? a : b;
#endif
}

PC_FORCE_INLINE Bytes min(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
  return (Bytes)_mm512_maskz_min_epu8(~__mmask64{0}, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Bytes)_mm256_min_epu8((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (Bytes)_mm_min_epu8((__m128i)a, (__m128i)b);
#else
  return a < b ? a : b;
#endif
}

// a - b, or 0 if b is larger.
PC_FORCE_INLINE Words subtract_saturating(Words a, Words b) {
#if defined(__AVX512BW__)
  return (Words)_mm512_maskz_subs_epu16(~__mmask32{0}, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Words)_mm256_subs_epu16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (Words)_mm_subs_epu16((__m128i)a, (__m128i)b);
#else
  return (Words)vqsubq_u16((uint16x8_t)a, (uint16x8_t)b);
#endif
}

// True if a word is not 0.
PC_FORCE_INLINE bool any_word(Words words) {
#if defined(__AVX512BW__)
  return _mm512_test_epi32_mask((__m512i)words, (__m512i)words) != 0;
#elif defined(__AVX2__)
  return _mm256_testz_si256((__m256i)words, (__m256i)words) == 0;
#elif defined(__SSE4_1__)
  return _mm_testz_si128((__m128i)words, (__m128i)words) == 0;
#else
  uint16_t any = 0;
  for (int i = 0; i < kWordLanes; ++i) any |= words[i];
  return any != 0;
#endif
}

PC_FORCE_INLINE Words max_signed(Words a, Words b) {
#if defined(__AVX512BW__)
  return (Words)_mm512_maskz_max_epi16(~__mmask32{0}, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Words)_mm256_max_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (Words)_mm_max_epi16((__m128i)a, (__m128i)b);
#else
  return (Words)vmaxq_s16((int16x8_t)a, (int16x8_t)b);
#endif
}

// Loads the first `count` bytes at p, followed by zeros.
PC_FORCE_INLINE Bytes load_bytes(const char* p, int64_t count) {
  if (count >= kByteLanes) return *reinterpret_cast<const LooseBytes*>(p);
#if defined(__AVX512BW__)
  return (Bytes)_mm512_maskz_loadu_epi8((__mmask64{1} << count) - 1, p);
#else
  Bytes bytes = {};
  __builtin_memcpy(&bytes, p, static_cast<size_t>(count));
  return bytes;
#endif
}

PC_FORCE_INLINE void store_words(uint16_t* p, Words v) { *reinterpret_cast<LooseWords*>(p) = v; }

// 16 bytes, once in each 16-byte part of the vector.
PC_FORCE_INLINE Bytes repeat(const uint8_t (&table)[16]) {
#if defined(__AVX512BW__)
  return (Bytes)_mm512_maskz_broadcast_i32x4(kAllLanes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
#elif defined(__AVX2__)
  return (Bytes)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
#else
  return *reinterpret_cast<const LooseBytes*>(table);
#endif
}

// The table entries of each index below 16. The table repeats in each 16-byte part.
PC_FORCE_INLINE Bytes look_up(Bytes table, Bytes index) {
#if defined(__AVX512BW__)
  return (Bytes)_mm512_maskz_shuffle_epi8(~__mmask64{0}, (__m512i)table, (__m512i)index);
#elif defined(__AVX2__)
  return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#elif defined(__x86_64__)
  return (Bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#else
  return (Bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#endif
}

// A table for look_up().
struct NibbleTable {
  uint8_t bytes[16];
};

template <typename EntryOf>
constexpr NibbleTable table_16(EntryOf&& entry) {
  NibbleTable table{};
  for (int i = 0; i < 16; ++i) table.bytes[i] = static_cast<uint8_t>(entry(i));
  return table;
}

#if defined(__AVX512VBMI__)
// A table of 64 bytes.
struct ByteTable64 {
  alignas(64) uint8_t bytes[64];
};

template <typename EntryOf>
constexpr ByteTable64 table_64(EntryOf&& entry) {
  ByteTable64 table{};
  for (int i = 0; i < 64; ++i) table.bytes[i] = static_cast<uint8_t>(entry(i));
  return table;
}

// A table of 128 bytes, and the table in registers.
struct ByteTable128 {
  alignas(64) uint8_t bytes[128];
};

template <typename EntryOf>
constexpr ByteTable128 table_128(EntryOf&& entry) {
  ByteTable128 table{};
  for (int i = 0; i < 128; ++i) table.bytes[i] = static_cast<uint8_t>(entry(i));
  return table;
}

struct WideTable {
  PC_FORCE_INLINE explicit WideTable(const ByteTable128& table)
      : first(_mm512_load_si512(table.bytes)), second(_mm512_load_si512(table.bytes + 64)) {}
  __m512i first, second;
};

// The table entries of the low 7 bits of each index. In assembly, because GCC 12 uses the form that overwrites a table,
// and copies the table each time.
PC_FORCE_INLINE Bytes look_up_128(const WideTable& table, Bytes index) {
  asm("vpermi2b %[second], %[first], %[index]"
      : [index] "+v"(index)
      : [first] "v"(table.first), [second] "v"(table.second));
  return index;
}

// The same; 0 for indices that are not in `some`.
PC_FORCE_INLINE Bytes look_up_128(const WideTable& table, Bytes index, __mmask64 some) {
  asm("vpermi2b %[second], %[first], %[index]%{%[some]%}%{z%}"
      : [index] "+v"(index)
      : [first] "v"(table.first), [second] "v"(table.second), [some] "Yk"(some));
  return index;
}

// bytes | (signs & 0x80)
PC_FORCE_INLINE Bytes with_sign(Bytes bytes, Bytes signs) {
  return (Bytes)_mm512_ternarylogic_epi32((__m512i)bytes, (__m512i)signs, (__m512i)(Bytes{} + 0x80), 0xf8);
}
#endif

// Moves bytes so that the words of zip_low() and then of zip_high() have the order that the bytes had before.
PC_FORCE_INLINE Bytes spread(Bytes bytes) {
#if defined(__AVX512BW__)
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  return (Bytes)_mm512_maskz_permutexvar_epi64(0xff, order, (__m512i)bytes);
#elif defined(__AVX2__)
  return (Bytes)_mm256_permute4x64_epi64((__m256i)bytes, 0b11'01'10'00);
#else
  return bytes;
#endif
}

// The low and high bytes of words, interleaved in the low and in the high half of each 16-byte part.
PC_FORCE_INLINE Words zip_low(Bytes low, Bytes high) {
#if defined(__AVX512BW__)
  return (Words)_mm512_maskz_unpacklo_epi8(~__mmask64{0}, (__m512i)low, (__m512i)high);
#elif defined(__AVX2__)
  return (Words)_mm256_unpacklo_epi8((__m256i)low, (__m256i)high);
#elif defined(__x86_64__)
  return (Words)_mm_unpacklo_epi8((__m128i)low, (__m128i)high);
#else
  return (Words)vzip1q_u8((uint8x16_t)low, (uint8x16_t)high);
#endif
}

PC_FORCE_INLINE Words zip_high(Bytes low, Bytes high) {
#if defined(__AVX512BW__)
  return (Words)_mm512_maskz_unpackhi_epi8(~__mmask64{0}, (__m512i)low, (__m512i)high);
#elif defined(__AVX2__)
  return (Words)_mm256_unpackhi_epi8((__m256i)low, (__m256i)high);
#elif defined(__x86_64__)
  return (Words)_mm_unpackhi_epi8((__m128i)low, (__m128i)high);
#else
  return (Words)vzip2q_u8((uint8x16_t)low, (uint8x16_t)high);
#endif
}

// The low and the high bytes of words.
struct BytePair {
  Bytes low, high;
};

// Calls put(first, words) for the two vectors of words of bytes from spread().
template <typename Put>
PC_FORCE_INLINE void put_words(BytePair bytes, Put&& put) {
  put(0, zip_low(bytes.low, bytes.high));
  put(kWordLanes, zip_high(bytes.low, bytes.high));
}

// Pairs of words as two vectors of float32, the words being the high halves; and back, cutting off the low halves.
PC_FORCE_INLINE Vec even_floats(Words words) { return (Vec)((BitVec)words << 16); }
PC_FORCE_INLINE Vec odd_floats(Words words) { return (Vec)((BitVec)words & 0xffff0000); }
PC_FORCE_INLINE Words high_halves(Vec even, Vec odd) {
  return (Words)(((BitVec)even >> 16) | ((BitVec)odd & 0xffff0000));
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
