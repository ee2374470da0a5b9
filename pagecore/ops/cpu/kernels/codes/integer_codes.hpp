// Codes of integers as vectors of int16, for exact products with int16 by pairs (PMADDWD). The numbers of e2m1 are
// integers times a half.
//
//   bytes   a vector of stored bytes; the words of a vector of pairs are those of two rows in turn
//   part    int8 has one part, the bytes; 4-bit codes have two, the low and the high nibbles, a byte each
//   words   the even and the odd bytes of a part
//
// The words e (0: even, 1: odd) of part i are operand 2 i + e; dim_of() gives the dim of each word.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/few_rows.hpp"
#include "pagecore/ops/cpu/kernels/simd/codes.hpp"
#include "pagecore/ops/cpu/kernels/simd/convert.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

typedef int16_t Shorts __attribute__((vector_size(kByteLanes)));
typedef int16_t LooseShorts __attribute__((vector_size(kByteLanes), aligned(1), may_alias));

// The largest magnitude of int16 on both sides of 0.
constexpr float kLargestShort = 32767.0f;
// The same of two digits of int8, high * 256 + low, both of which are 127.
constexpr float kLargestDigits = 127.0f * 256.0f + 127.0f;
// Smaller numbers are not made integers, because their inverse or its products could overflow.
constexpr float kLeastScale = 0x1p-90f;

PC_FORCE_INLINE Shorts load_shorts(const int16_t* p) { return *reinterpret_cast<const LooseShorts*>(p); }

// A pair of integers in all lanes.
PC_FORCE_INLINE Shorts repeat_pair(const int16_t* p) {
  typedef int32_t Pair __attribute__((may_alias, aligned(2)));
  return (Shorts)(IntVec{} + *reinterpret_cast<const Pair*>(p));
}

// A vector of a row that has `count` more bytes; those past its end are 0. Dims are multiples of 64, so that only the
// widest vectors end past a row.
PC_FORCE_INLINE Bytes load_stored(const char* p, [[maybe_unused]] int64_t count) {
#if defined(__AVX512BW__)
  return load_bytes(p, count);
#else
  return *reinterpret_cast<const LooseBytes*>(p);
#endif
}

// a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1]
PC_FORCE_INLINE IntVec multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (IntVec)_mm512_maskz_madd_epi16(kAllLanes, (__m512i)a, (__m512i)b);
#else
  return (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// sum + multiply_pairs(a, b). Without an instruction for both, the sum is made here: GCC would add products first, and
// lack registers for them. It is passed by value, because GCC keeps an array in memory whose elements are operands of
// assembly.
PC_FORCE_INLINE IntVec add_pairs(IntVec sum, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  sum += multiply_pairs(a, b);
#if defined(__AVX512F__)
  asm("" : "+v"(sum));
#else
  asm("" : "+x"(sum));
#endif
  return sum;
#endif
}

PC_FORCE_INLINE Vec to_floats(IntVec v) { return __builtin_convertvector(v, Vec); }

// The nearest integers, ties to even.
PC_FORCE_INLINE IntVec nearest(Vec v) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_maskz_cvtps_epi32(kAllLanes, (__m512)v);
#else
  return (IntVec)_mm256_cvtps_epi32((__m256)v);
#endif
}

// Stores 2 kLanes integers that fit in int16.
PC_FORCE_INLINE void store_shorts(int16_t* to, IntVec low, IntVec high) {
#if defined(__AVX512F__)
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  const __m512i both = _mm512_maskz_packs_epi32(~__mmask32{0}, (__m512i)low, (__m512i)high);
  _mm512_storeu_si512(to, _mm512_maskz_permutexvar_epi64(0xff, order, both));
#else
  const __m256i both = _mm256_packs_epi32((__m256i)low, (__m256i)high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(both, 0b11'01'10'00));
#endif
}

// The words of two rows in turn, a0 b0 a1 b1 .., from the low (kHalf 0) or the high half of each 16-byte part.
template <int kHalf>
PC_FORCE_INLINE Bytes zip_words(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
  constexpr __mmask32 kAll = ~__mmask32{0};
  return (Bytes)(kHalf == 0 ? _mm512_maskz_unpacklo_epi16(kAll, (__m512i)a, (__m512i)b)
                            : _mm512_maskz_unpackhi_epi16(kAll, (__m512i)a, (__m512i)b));
#else
  return (Bytes)(kHalf == 0 ? _mm256_unpacklo_epi16((__m256i)a, (__m256i)b)
                            : _mm256_unpackhi_epi16((__m256i)a, (__m256i)b));
#endif
}

// Sign-extended.
PC_FORCE_INLINE void split(Bytes bytes, Shorts (&words)[2]) {
  words[0] = (Shorts)((Words)bytes << 8) >> 8;
  words[1] = (Shorts)bytes >> 8;
}

template <int kPart>
PC_FORCE_INLINE Words nibbles(Bytes bytes) {
  return (Words)bytes >> 4 * kPart & 0x0f0f;
}

// Codes of integers without groups; words() writes the words of a part of a vector of stored bytes.
template <int kPartsOfByte, bool kZeroPoints>
struct PlainIntegers {
  static constexpr int kParts = kPartsOfByte, kGroup = 0;
  static constexpr bool kHasZeroPoints = kZeroPoints;
  static constexpr float kUnit = 1.0f;
};

struct Int8Integers : PlainIntegers<1, false> {
  template <int kPart>
  PC_FORCE_INLINE void words(Bytes stored, Shorts (&to)[2]) const {
    split(stored, to);
  }
};

struct Int4Integers : PlainIntegers<2, true> {
  template <int kPart>
  PC_FORCE_INLINE void words(Bytes stored, Shorts (&to)[2]) const {
    to[0] = (Shorts)((Words)stored >> 4 * kPart & 15);
    to[1] = (Shorts)((Words)stored >> (8 + 4 * kPart) & 15);
  }
  PC_FORCE_INLINE Bytes of_low_nibbles(Bytes stored) const { return stored & 15; }
};

// e2m1, with scales of groups of 16.
struct E2M1Integers {
  static constexpr int kParts = 2, kGroup = 16;
  static constexpr bool kHasZeroPoints = false;
  static constexpr float kUnit = 0.5f;

#if defined(__AVX512BW__)
  // The other nibbles of a word are shifted out of its index, or do not count in it.
  template <int kPart>
  PC_FORCE_INLINE void words(Bytes stored, Shorts (&to)[2]) const {
    to[0] = look_up_words((Words)stored >> 4 * kPart);
    to[1] = look_up_words((Words)stored >> (8 + 4 * kPart));
  }

  // Dims of the vectors of values(), of which a group has one.
  static constexpr int64_t kValueDims = 64;
  // The numbers of two tokens in turn, in the order of the dims: vectors from kFrom on.
  template <int kFrom, int kCount>
  PC_FORCE_INLINE void values(const char* a, const char* b, Shorts (&to)[kCount]) const {
    const auto half = [](const char* row) __attribute__((always_inline)) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
    };
    const __m512i rows = _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(half(a)), half(b), 1);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      const __m512i order = _mm512_load_si512(kOrders.words[kFrom + i]);
      const __m512i words = _mm512_maskz_permutexvar_epi16(~__mmask32{0}, order, rows);
      to[i] = look_up_words((Words)_mm512_maskz_srlv_epi16(~__mmask32{0}, words, _mm512_load_si512(kShifts.words[0])));
    }
  }
  template <int kCount>
  PC_FORCE_INLINE static void order_values(Vec (&)[kCount]) {}
#else
  template <int kPart>
  PC_FORCE_INLINE void words(Bytes stored, Shorts (&to)[2]) const {
    split(look_up(halves_, (Bytes)nibbles<kPart>(stored)), to);
  }

  // Dims of the vectors of values(): a group has two.
  static constexpr int64_t kValueDims = 16;
  // The numbers of two tokens in turn. The dims of the vectors are 0 4 8 12 1 5 9 13 and 2 6 10 14 3 7 11 15.
  template <int kFrom>
  PC_FORCE_INLINE void values(const char* a, const char* b, Shorts (&to)[2]) const {
    const auto repeat_row = [](const char* row) __attribute__((always_inline)) {
      int64_t codes;
      __builtin_memcpy(&codes, row, sizeof codes);
      return _mm256_set1_epi64x(codes);
    };
    // The lower half has the low nibbles, the upper half the high ones.
    const __m256i both = _mm256_unpacklo_epi16(repeat_row(a), repeat_row(b));
    const auto index = (Bytes)_mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)) & 15;
    split(look_up(halves_, index), to);
  }
  PC_FORCE_INLINE static void order_values(Vec (&v)[2]) {
    const Vec low = zip_low(v[0], v[1]), high = zip_high(v[0], v[1]);
    v[0] = __builtin_shufflevector(low, low, 0, 4, 1, 5, 2, 6, 3, 7);
    v[1] = __builtin_shufflevector(high, high, 0, 4, 1, 5, 2, 6, 3, 7);
  }
#endif

 private:
  static constexpr uint8_t kHalves[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
#if defined(__AVX512BW__)
  template <int kRows>
  struct WordTable {
    alignas(64) uint16_t words[kRows][kWordLanes];
  };
  // Of two rows of 16 words of codes: pair i of vector n has the words of both with the dim 16 n + i, the nibble i % 4.
  static constexpr auto kOrders = [] {
    WordTable<4> table{};
    for (int n = 0; n < 4; ++n) {
      for (int i = 0; i < kWordLanes; ++i) table.words[n][i] = static_cast<uint16_t>(4 * n + i / 8 + i % 2 * 16);
    }
    return table;
  }();
  static constexpr auto kShifts = [] {
    WordTable<1> table{};
    for (int i = 0; i < kWordLanes; ++i) table.words[0][i] = static_cast<uint16_t>(i / 2 % 4 * 4);
    return table;
  }();

  PC_FORCE_INLINE Shorts look_up_words(Words index) const {
    return (Shorts)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)index, halves_);
  }

  // Twice the 16 numbers.
  const __m512i halves_ = _mm512_maskz_cvtepi8_epi16(
      ~__mmask32{0}, _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kHalves))));
#else
  const Bytes halves_ = repeat(kHalves);
#endif
};

template <typename Codes>
constexpr bool kHasGroups = Codes::kGroup != 0;

template <typename Codes>
constexpr int kOperands = 2 * Codes::kParts;

// Dims in a vector of stored bytes.
template <typename Codes>
constexpr int kBytesDims = kOperands<Codes> * kWordLanes;

// The dim of word `word` of an operand.
template <typename Codes>
constexpr int dim_of(int operand, int word) {
  const int part = operand / 2, odd = operand % 2;
  return Codes::kParts == 1 ? 2 * word + odd : 4 * word + 2 * odd + part;
}

// Calls visit.operator()<Codes>() for the codes of a format.
template <typename Visit>
PC_FORCE_INLINE auto with_integers(Format format, Visit&& visit) {
  switch (format) {
    case Format::I8Token: return visit.template operator()<Int8Integers>();
    case Format::I4Token: return visit.template operator()<Int4Integers>();
    default: return visit.template operator()<E2M1Integers>();
  }
}

// True if the codes of a format are integers.
PC_FORCE_INLINE bool has_integers(Format format) {
  return format == Format::I8Token || format == Format::I4Token || format == Format::FP4Block16 ||
         format == Format::NVFP4;
}

// True if the products of a format and dim are made here. The lanes of a key hold 2,048 dims of int8, and one lane as
// many of 4-bit codes, in int32.
PC_FORCE_INLINE bool has_integers(const Cache& cache) {
  return has_integers(cache.format) && cache.dim % 64 == 0 && cache.dim <= 2048;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
