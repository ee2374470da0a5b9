// The codes of a quad as bytes, in the order of the numbers, for each kind of code.
//
// `scaled(magnitude, i)` and `scaled(number, i)` multiply vector `i` of a quad by its factors.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/quads.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Bits of |v|, which are in the order of the numbers; NaN is above infinity.
PC_FORCE_INLINE IntVec magnitude_bits(Vec v) { return (IntVec)v & kMagnitudeBits; }

PC_FORCE_INLINE Bytes add_signs(Bytes codes, Bytes signs) { return codes | (signs & 0x80); }

// Codes of a float of 8 bits: nearest even, saturating, NaN is 0x7f. With kInside, no magnitude rounds above the
// largest number, and none is NaN. `flips` is 0x80 if the sign of the factor is negative.
template <typename Code, Float From, bool kInside, typename Scaled>
PC_FORCE_INLINE Bytes float8_quad(const char* source, Scaled&& scaled, uint8_t flips = 0) {
  Vec quad[4];
  IntVec lanes[4], most{};
  load_quad<From>(source, quad);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    IntVec magnitude = (IntVec)scaled((Vec)magnitude_bits(quad[i]), i) & (flips == 0 ? -1 : kMagnitudeBits);
    if constexpr (!kInside) {
      most = max(most, magnitude);
      magnitude = min(magnitude, bits_of(Code::kLargest));
    }
    lanes[i] = Code::sums(magnitude);
  }
  const Bytes codes = low_bytes<From, LaneRange::Any>(lanes) - Code::kOffset;
  const Bytes signed_codes = add_signs(codes, quad_signs<From, true>(source) ^ flips);
  if constexpr (!kInside) {
    if (any_lane(most > kInfinityBits)) [[unlikely]] {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const IntVec magnitude = (IntVec)scaled((Vec)magnitude_bits(quad[i]), i) & kMagnitudeBits;
        lanes[i] = (magnitude > kInfinityBits) & 0xff;
      }
      const Bytes nan = low_bytes<From, LaneRange::Unsigned>(lanes);
      return in_order<From>((signed_codes & ~nan) | (nan & 0x7f));
    }
  }
  return in_order<From>(signed_codes);
}

// The nearest integers, halves away from 0; those of NaN mean nothing. With kInside, no number rounds out of int8.
template <Float From, bool kInside>
PC_FORCE_INLINE Bytes int8_quad(const char* source, Vec factor) {
  Vec quad[4];
  IntVec lanes[4];
  load_quad<From>(source, quad);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Vec v = rounded(quad[i] * factor);
    if constexpr (!kInside) v = min(max(v, splat(-128.0f)), splat(127.0f));
    const IntVec half = bits_of(kAlmostHalf) | ((IntVec)v & ~kMagnitudeBits);
    lanes[i] = __builtin_convertvector(v + (Vec)half, IntVec);
  }
  return in_order<From>(low_bytes<From, LaneRange::Signed>(lanes));
}

// The nearest integers of [0, 15] of numbers times a factor plus a shift, halves up; those of NaN mean nothing. With
// kInside, the sums are at least -0.5 and finite.
template <Float From, bool kInside>
PC_FORCE_INLINE Bytes nibble_quad(const char* source, Vec factor, Vec shift) {
  Vec quad[4];
  IntVec lanes[4];
  load_quad<From>(source, quad);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Vec v = rounded(quad[i] * factor) + shift;
    if constexpr (!kInside) v = min(max(v, Vec{}), splat(15.0f));
    lanes[i] = __builtin_convertvector(v + splat(kAlmostHalf), IntVec);
  }
  const Bytes codes = low_bytes<From, LaneRange::Unsigned>(lanes);
  return in_order<From>(kInside ? min(codes, Bytes{} + 15) : codes);
}

// The code of e2m1 of a count of quarters up to 24, halves up.
constexpr int e2m1_of_quarters(int i) {
  return (i >= 1) + (i >= 3) + (i >= 5) + (i >= 7) + (i >= 10) + (i >= 14) + (i >= 20);
}

PC_FORCE_INLINE Bytes e2m1_of_quarters(Bytes quarters) {
#if defined(__AVX512VBMI__)
  static constexpr ByteTable64 kTable = table_64([](int i) { return e2m1_of_quarters(i); });
  return (Bytes)_mm512_maskz_permutexvar_epi8(~__mmask64{0}, (__m512i)quarters, _mm512_load_si512(kTable.bytes));
#else
  // An index from 128 on selects 0, on some machines any from 16 on does.
  static constexpr uint8_t kLow[16] = {0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6};
  static constexpr uint8_t kHigh[16] = {6, 6, 6, 6, 7, 7, 7, 7, 7};
#if defined(__x86_64__)
  const Bytes low = quarters + 0x70;
#else
  const Bytes low = quarters;
#endif
  return look_up(repeat(kLow), low) | look_up(repeat(kHigh), quarters - 16);
#endif
}

// The sign of e2m1 in bit 3.
PC_FORCE_INLINE Bytes nibble_signs(Bytes signs) { return (Bytes)((Words)signs >> 4) & 8; }

// Codes of e2m1, halves up: saturating, -0 is 0; those of NaN mean nothing. `quarters` multiplies by four times the
// factors.
template <Float From, typename Quarters>
PC_FORCE_INLINE Bytes e2m1_quad_up(const char* source, Quarters&& quarters) {
  Vec quad[4];
  IntVec lanes[4];
  load_quad<From>(source, quad);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    lanes[i] = __builtin_convertvector(min(quarters((Vec)magnitude_bits(quad[i]), i), splat(24.0f)), IntVec);
  }
  const Bytes codes = e2m1_of_quarters(low_bytes<From, LaneRange::Unsigned>(lanes));
  return in_order<From>(codes | nibble_signs(quad_signs<From, false>(source)));
}

// Codes of e2m1 to nearest even: saturating; those of NaN mean nothing.
template <Float From, typename Scaled>
PC_FORCE_INLINE Bytes e2m1_quad_even(const char* source, Scaled&& scaled) {
  Vec quad[4];
  IntVec lanes[4];
  load_quad<From>(source, quad);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    lanes[i] = E2M1::sums((IntVec)min(scaled((Vec)magnitude_bits(quad[i]), i), splat(E2M1::kLargest)));
  }
  const Bytes codes = low_bytes<From, LaneRange::Any>(lanes) - E2M1::kOffset;
  return in_order<From>(codes | nibble_signs(quad_signs<From, true>(source)));
}

// The code of e2m1 of a number, to nearest even, by the sum of its quarters rounded down and up, which is odd between
// two quarters. Sums are at most 48.
constexpr int e2m1_of_sums(int i) {
  return (i > 2) + (i >= 6) + (i > 10) + (i >= 14) + (i > 20) + (i >= 28) + (i > 40);
}

PC_FORCE_INLINE Bytes e2m1_of_sums(Bytes sums) {
#if defined(__AVX512VBMI__)
  static constexpr ByteTable64 kTable = table_64([](int i) { return e2m1_of_sums(i); });
  return (Bytes)_mm512_maskz_permutexvar_epi8(~__mmask64{0}, (__m512i)sums, _mm512_load_si512(kTable.bytes));
#else
  // As in e2m1_of_quarters(). The code of 48 is that of 47.
  static constexpr uint8_t kTables[3][16] = {{0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4},
                                             {4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6},
                                             {6, 6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7}};
  const Bytes index = min(sums, Bytes{} + 47);
#if defined(__x86_64__)
  // Only 0x70 .. 0x7f select entries: other indices get their top bit by the sum, or by saturation.
  const Bytes low = index + 0x70, middle = add_saturating(index - 16, Bytes{} + 0x70);
#else
  const Bytes low = index, middle = index - 16;
#endif
  return look_up(repeat(kTables[0]), low) | look_up(repeat(kTables[1]), middle) |
         look_up(repeat(kTables[2]), index - 32);
#endif
}

// The same for bfloat16 times factors, whose products differ from ties of codes by 2^-10 or more unless they are ties:
// they are rounded to multiples of 2^-13, which are the low words of lanes.
template <typename FactorOf>
PC_FORCE_INLINE Bytes e2m1_quad_of_pairs(const char* source, FactorOf&& factor_of) {
  const Vec ones = splat(0x1.8p10f);  // their last bit is 2^-13
  Vec quad[4];
  IntVec lanes[4];
  Words sums[2];
  load_quad<Float::BF16>(source, quad);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    lanes[i] = (IntVec)min(fma((Vec)magnitude_bits(quad[i]), factor_of(i), ones), ones + E2M1::kLargest);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Words numbers = join_words(lanes[2 * i], lanes[2 * i + 1]);
    sums[i] = (numbers >> 11) + ((numbers + 2047) >> 11);
  }
  const Bytes codes = e2m1_of_sums(narrow_words(sums[0], sums[1]));
  return in_order<Float::BF16>(codes | nibble_signs(quad_signs<Float::BF16, true>(source)));
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
