// Rows of numbers as integers of two digits of int8, for exact products with int8 on AMX: high * 256 + low.
//
// A row becomes integers times its largest magnitude / 32639: the error is at most 1.6e-5 of that number.
//
// A tile of 16 rows or columns has the high digits of up to 8 rows, then their low digits.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/integer_scores.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX)

constexpr int kLowDigits = static_cast<int>(kCodeRows);

// The integer of two sums of products with digits.
PC_FORCE_INLINE Vec join_digits(Vec high, Vec low) {
  return fma(to_floats((IntVec)high), splat(256.0f), to_floats((IntVec)low));
}

// The low nibbles of 32 bytes, then their high nibbles, in the low bits of bytes.
PC_FORCE_INLINE Bytes nibble_halves(const char* codes) {
  const __m512i both = _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const auto shifts =
      (__m512i)(Words{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4});
  return (Bytes)_mm512_maskz_srlv_epi16(~__mmask32{0}, both, shifts);
}

// Stores the digits of 64 integers. Dword 4 i + j of each has the integers 4 i .. 4 i + 3 of vector j.
PC_FORCE_INLINE void store_digits(const IntVec (&integers)[4], int8_t* high, int8_t* low) {
  constexpr __mmask32 kAll = ~__mmask32{0};
  const auto words = [&](int i) __attribute__((always_inline)) {
    return (Words)_mm512_maskz_packs_epi32(kAll, (__m512i)integers[i], (__m512i)integers[i + 1]);
  };
  const Words a = words(0), b = words(2);
  const auto high_of = [](Words x) __attribute__((always_inline)) { return (__m512i)((Shorts)(x + 128) >> 8); };
  _mm512_store_si512(high, _mm512_maskz_packs_epi16(~__mmask64{0}, high_of(a), high_of(b)));
  _mm512_store_si512(low, _mm512_maskz_packus_epi16(~__mmask64{0}, (__m512i)(a & 255), (__m512i)(b & 255)));
}

// The place of the dword of tokens 4 q .. 4 q + 3 in the digits of a tile.
constexpr int dword_of_tokens(int q) { return q % 4 * 4 + q / 4; }

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
