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
  IntVec lanes[4];
  BitVec most{};
  load_quad<From>(source, quad);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    auto magnitude = (BitVec)scaled((Vec)magnitude_bits(quad[i]), i) & (flips == 0 ? ~0u : uint32_t{kMagnitudeBits});
    if constexpr (!kInside) {  // a NaN of a division may have a sign: as unsigned it is large, too
      const auto largest = (BitVec)bits_of(Code::kLargest);
      most = magnitude > most ? magnitude : most;
      magnitude = magnitude < largest ? magnitude : largest;
    }
    lanes[i] = Code::sums((IntVec)magnitude);
  }
  const Bytes codes = low_bytes<From, LaneRange::Sums>(lanes) - Code::kOffset;
  const Bytes signed_codes = add_signs(codes, quad_signs<From, true>(source) ^ flips);
  if constexpr (!kInside) {
    if (any_lane((IntVec)(most > uint32_t{kInfinityBits}))) [[unlikely]] {
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

// The code of e2m1 of a count of quarters, halves up.
constexpr int e2m1_of_quarters(int i) {
  return (i >= 1) + (i >= 3) + (i >= 5) + (i >= 7) + (i >= 10) + (i >= 14) + (i >= 20);
}

// Entries kEntry(index) of indices below 25.
template <int (*kEntry)(int)>
PC_FORCE_INLINE Bytes e2m1_entries(Bytes index) {
#if defined(__AVX512VBMI__)
  static constexpr ByteTable64 kTable = table_64([](int i) { return kEntry(i); });
  return (Bytes)_mm512_maskz_permutexvar_epi8(~__mmask64{0}, (__m512i)index, _mm512_load_si512(kTable.bytes));
#else
  // An index from 128 on selects 0, on some machines any from 16 on does.
  static constexpr NibbleTable kLow = table_16([](int i) { return kEntry(i); });
  static constexpr NibbleTable kHigh = table_16([](int i) { return i < 9 ? kEntry(16 + i) : 0; });
#if defined(__x86_64__)
  const Bytes low = index + 0x70;
#else
  const Bytes low = index;
#endif
  return look_up(repeat(kLow.bytes), low) | look_up(repeat(kHigh.bytes), index - 16);
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
  const Bytes codes = e2m1_entries<e2m1_of_quarters>(low_bytes<From, LaneRange::Unsigned>(lanes));
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
  const Bytes codes = low_bytes<From, LaneRange::Sums>(lanes) - E2M1::kOffset;
  return in_order<From>(codes | nibble_signs(quad_signs<From, true>(source)));
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
