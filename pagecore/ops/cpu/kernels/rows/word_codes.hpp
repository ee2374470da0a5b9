// The codes of a quad by integer arithmetic on words of 16 bits, whose order is that of the magnitudes. A vector has
// twice the numbers of one of float32.
//
// e2m1_quad_of_words() compares the words of the numbers themselves, bfloat16 or float16. e4m3_quad_of_words() and
// e2m1_quad_of_quotients() compare words of load_word_quad(): bfloat16, where 128 more is twice the magnitude. There
// numbers of other types are rounded to odd, which changes no code: codes change at numbers of up to seven bits.
//
// Numbers of float16 below 2^-14 are subnormal: their words have the right order, but 128 more is not twice the
// magnitude. No code of e2m1 may depend on them, which needs_floats() of quantize_groups.hpp ensures;
// e4m3_quad_of_words() leaves quads that have them, other than 0, to `floats()`: see `small`.
#pragma once

#include "pagecore/ops/cpu/kernels/rows/quad_codes.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The exponent of a scale of UE8M0 as the number that e4m3_quad_of_words() subtracts, twice.
PC_FORCE_INLINE IntVec e4m3_offset_pair(IntVec exponent) { return ((exponent - 7) << 3) * 0x10001; }

// Codes of e4m3 of numbers divided by powers of two. As in float8_quad(), no magnitude rounds above the largest number,
// and none is NaN. `offset_of(half)` is from e4m3_offset_pair(). The code of a normal number is its magnitude, rounded
// to four bits, to nearest even, less the offset. Smaller numbers are rare: `floats()` returns the codes of their quad.
template <Float From, typename OffsetOf, typename Floats>
PC_FORCE_INLINE Bytes e4m3_quad_of_words(const char* source, OffsetOf&& offset_of, Floats&& floats) {
  Words magnitudes[2], signs[2], codes[2], small{};
  load_word_quad<From>(source, magnitudes, signs);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    if constexpr (From == Float::F16)
      magnitudes[half] = (magnitudes[half] + kHalfBias) & (Words)(magnitudes[half] != 0);
    // `less` of 0 is the largest word, which is not small. The last bit of `kept` is that of the code unless the
    // magnitude has no other bits, and then it does not matter.
    const Words less = magnitudes[half] - 1, kept = less >> 4;
    const Words offset = offset_of(half);
    codes[half] = subtract_saturating((Words)(less + (kept & 1) + 8) >> 4, offset);
    Words least = offset + 8;
    if constexpr (From == Float::F16) least = max(least, Words{} + 0x388);  // 2^-14
    small |= subtract_saturating(least, kept);
  }
  if (any_word(small)) [[unlikely]]
    return floats();
  return in_order<Float::BF16>(add_signs(narrow_words(codes[0], codes[1]), word_signs<true>(signs[0], signs[1])));
}

// The code of e2m1 of a quarter of a binade, halves up: 1 begins at 1/4, 5 at 1/2, and 7 at 3/4.
constexpr int e2m1_of_steps(int i) {
  return (i >= 1) + (i >= 7) + (i >= 10) + (i >= 12) + (i >= 14) + (i >= 16) + (i >= 18);
}

// Bits of the fraction of a number of 16 bits, and the exponent of bfloat16 that has the exponent 0 of the type.
template <Float From>
constexpr int kFractionBits = From == Float::F16 ? 10 : 7;
template <Float From>
constexpr int kFirstExponent = From == Float::F16 ? 112 : 0;

// The exponent of a scale of UE8M0 as the word that e2m1_quad_of_words() subtracts, twice: a quarter of the scale, less
// a quarter of a binade.
template <Float From>
PC_FORCE_INLINE IntVec e2m1_offset_pair(IntVec exponent) {
  const IntVec quarter = (exponent - 2 - kFirstExponent<From>) << kFractionBits<From>;
  // Unsigned, because the product overflows an int if the scale is past float16, whose codes are not used.
  return (IntVec)((BitVec)(quarter - (1 << (kFractionBits<From> - 2))) * 0x10001);
}

// Codes of e2m1, halves up, of numbers of 16 bits divided by powers of two: -0 is 0. No quotient is above 6.
// `offset_of(half)` is from e2m1_offset_pair().
template <Float From, typename OffsetOf>
PC_FORCE_INLINE Bytes e2m1_quad_of_words(const char* source, OffsetOf&& offset_of) {
  Words signs[2], steps[2];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    signs[half] = load_words(source + half * kByteLanes);
    steps[half] = subtract_saturating(signs[half] & 0x7fff, offset_of(half)) >> (kFractionBits<From> - 2);
  }
  const Bytes codes = e2m1_entries<e2m1_of_steps>(narrow_words(steps[0], steps[1]));
  return in_order<Float::BF16>(codes | nibble_signs(word_signs<false>(signs[0], signs[1])));
}

// ---- e2m1 of numbers divided by a number with four leading bits, to nearest even
//
// The code changes at n/4 of the divisor, for n of 1, 3, 5, 7, 10, 14 and 20, which are numbers of bfloat16. Words are
// counted from a quarter of the divisor, whose leading bits are d. Whatever d is, each range of 64 words has one change
// or none:
//
//   range             0   1   2   3   4   5   6   7   8   9
//   n of its change   1           3   5   7  10  14  20
//   code before       0   1   1   1   2   3   4   5   6   7
constexpr int kE2m1Quarters[] = {1, 3, 5, 7, 10, 14, 20};

// The first word after the change i: that of n/4 of the divisor, or the next one if the code before is even.
constexpr int e2m1_first_word(int d, int i) {
  const auto word = [](int number) {
    int exponent = 0;
    while (number >> (exponent + 1) != 0) ++exponent;
    return exponent * 128 + (number * 128 >> exponent) - 128;
  };
  return word(kE2m1Quarters[i] * d) - word(d) + (i % 2 == 0);
}

// The code of a range before its change.
constexpr int e2m1_of_range(int range) {
  int code = 0;
  for (int i = 0; i < 7; ++i) code += e2m1_first_word(8, i) < 64 * range;
  return code;
}

// The first word after the change of range `index % 16`, for d = 8 + index / 16; 64 if it has none.
constexpr int e2m1_change(int index) {
  for (int i = 0; i < 7; ++i) {
    const int first = e2m1_first_word(8 + index / 16, i);
    if (first / 64 == index % 16) return first % 64;
  }
  return 64;
}

constexpr bool have_same_ranges() {
  for (int d = 9; d < 16; ++d) {
    for (int i = 0; i < 7; ++i) {
      if (e2m1_first_word(d, i) / 64 != e2m1_first_word(8, i) / 64) return false;
    }
  }
  return true;
}
static_assert(have_same_ranges());

// A quarter of the divisor as a word of load_word_quad(), twice.
template <Float From>
PC_FORCE_INLINE IntVec e2m1_quarter_pair(Vec divisor) {
  constexpr uint32_t kLess = 256 + (kFirstExponent<From> << 7);
  return (IntVec)(((((BitVec)divisor >> 16) - kLess) & 0xffff) * 0x10001);
}

// The first words after the changes of the ranges of a quad, in the order of the numbers.
PC_FORCE_INLINE Bytes e2m1_changes(Bytes ranges, [[maybe_unused]] const float* quarters) {
#if defined(__AVX512VBMI__)
  static constexpr ByteTable128 kChanges = table_128([](int i) { return e2m1_change(i); });
  return look_up_128(WideTable(kChanges), ranges);  // d is in the bits above the range
#else
  struct alignas(16) Tables {
    NibbleTable of_d[8];
  };
  static constexpr Tables kChanges = [] {
    Tables tables{};
    for (int d = 0; d < 8; ++d) tables.of_d[d] = table_16([=](int i) { return e2m1_change(16 * d + i); });
    return tables;
  }();
  const auto table = [=](int g) __attribute__((always_inline)) {
    const int d = reinterpret_cast<const uint8_t*>(quarters + g)[0] >> 4 & 7;
    return load_four(reinterpret_cast<const float*>(&kChanges.of_d[d]));
  };
#if defined(__AVX512F__)
  const __m512 two = _mm512_maskz_insertf32x4(kAllLanes, _mm512_castps128_ps512((__m128)table(0)), (__m128)table(1), 1);
  const __m512 three = _mm512_maskz_insertf32x4(kAllLanes, two, (__m128)table(2), 2);
  const auto changes = (Bytes)_mm512_maskz_insertf32x4(kAllLanes, three, (__m128)table(3), 3);
#elif defined(__AVX2__)
  const auto changes = (Bytes)_mm256_insertf128_ps(_mm256_castps128_ps256((__m128)table(0)), (__m128)table(1), 1);
#else
  const auto changes = (Bytes)table(0);
#endif
  return look_up(changes, ranges);
#endif
}

// The codes of a quad whose quotients are below 8; `quarters` are those of its groups of 16 numbers, from
// e2m1_quarter_pair().
template <Float From>
PC_FORCE_INLINE Bytes e2m1_quad_of_quotients(const char* source, const float* quarters) {
  Words magnitudes[2], signs[2], ranges[2], offsets[2];
  load_word_quad<From>(source, magnitudes, signs);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const Words quarter = half_quad_words<16>(quarters, half);
    const Words word = subtract_saturating(magnitudes[half], quarter);
    offsets[half] = word & 63;
    ranges[half] = word >> 6;
#if defined(__AVX512VBMI__)
    ranges[half] |= quarter & 0x70;
#endif
  }
  const Bytes range = in_order<Float::BF16>(narrow_words(ranges[0], ranges[1]));
  const Bytes offset = in_order<Float::BF16>(narrow_words(offsets[0], offsets[1]));
  static constexpr NibbleTable kCodes = table_16([](int i) { return e2m1_of_range(i); });
  const Bytes from = look_up(repeat(kCodes.bytes), range & 15), change = e2m1_changes(range, quarters);
  const Bytes codes = from - (Bytes)(offset >= change);
  return codes | nibble_signs(in_order<Float::BF16>(word_signs<true>(signs[0], signs[1])));
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
