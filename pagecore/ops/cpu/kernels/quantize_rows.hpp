// Rows of numbers to codes and scales, in the formats with a scale a row: one function for each dtype.
//
// Numbers are read twice: for the scales of kLanes rows or groups, which are computed as one vector, then for the
// codes.
#pragma once

#include "pagecore/ops/cpu/kernels/bytes.hpp"
#include "pagecore/ops/cpu/kernels/codes.hpp"
#include "pagecore/ops/cpu/kernels/convert.hpp"
#include "pagecore/ops/cpu/kernels/lines.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Rows of one call, and the bytes from one to the next.
struct RowBatch {
  const char* source;
  char* codes;
  char* scales;
  int64_t source_step;
  int64_t codes_step;
  int64_t scales_step;
  int64_t count;
  int64_t dim;
  float factor;  // the given one
};

using QuantizeRows = void (*)(const RowBatch&);

PC_FORCE_INLINE void store_part_of_codes(char* row, int64_t offset, IntVec codes, int64_t count) {
  if (count == kLanes) return store_codes(row + offset, codes);
  char padded[kLanes];
  store_codes(padded, codes);
  __builtin_memcpy(row + offset, padded, static_cast<size_t>(count));
}

// Bits of |v|, which are in the order of the numbers; NaN is above infinity.
PC_FORCE_INLINE IntVec magnitude_bits(Vec v) { return (IntVec)v & kMagnitudeBits; }

// The same with 0 for NaN.
PC_FORCE_INLINE IntVec known_bits(Vec v) {
  const IntVec bits = magnitude_bits(v);
  return bits & (bits <= kInfinityBits);
}

#if defined(__AVX512BW__)
// The largest magnitude of a row of bfloat16, as bits of float32; the rest of the row after whole vectors is left out.
PC_FORCE_INLINE IntVec magnitude_of_pairs(const char* source, int64_t dim) {
  auto most = _mm512_setzero_si512();
  for (int64_t d = 0; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    const auto words = (__m512i)((BitVec)_mm512_loadu_si512(source + 2 * d) & 0x7fff7fff);
    most = _mm512_maskz_max_epu16(~__mmask32{0}, most, words);
  }
  return max((IntVec)((BitVec)most << 16), (IntVec)((BitVec)most & 0xffff0000));
}
#endif

template <Float From, bool kKnown>
PC_FORCE_INLINE int32_t row_magnitude(const char* source, int64_t dim) {
#if defined(__AVX512BW__)
  if (From == Float::BF16 && !kKnown && dim % (2 * kLanes) == 0) {
    return max_of_lanes(magnitude_of_pairs(source, dim))[0];
  }
#endif
  IntVec most{};
  for_each_vector<From>(source, dim,
                        [&](int64_t, Vec v, int64_t) { most = max(most, kKnown ? known_bits(v) : magnitude_bits(v)); });
  return max_of_lanes(most)[0];
}

// One number for each row of a vector's worth.
union PerRow {
  float numbers[kLanes];
  int32_t bits[kLanes];
  IntVec vector;
  Vec floats;
};

// Calls visit(first, count) for each kLanes rows.
template <typename Visit>
PC_FORCE_INLINE void for_each_rows(const RowBatch& batch, Visit&& visit) {
  for (int64_t first = 0; first < batch.count; first += kLanes) {
    visit(first, batch.count - first < kLanes ? batch.count - first : kLanes);
  }
}

PC_FORCE_INLINE const char* source_of(const RowBatch& batch, int64_t row) {
  return batch.source + row * batch.source_step;
}
PC_FORCE_INLINE char* codes_of(const RowBatch& batch, int64_t row) { return batch.codes + row * batch.codes_step; }
PC_FORCE_INLINE char* scales_of(const RowBatch& batch, int64_t row) { return batch.scales + row * batch.scales_step; }

PC_FORCE_INLINE void store_scales(const RowBatch& batch, int64_t first, int64_t count, IntVec scales) {
  PerRow of_row;
  of_row.vector = scales;
  for (int64_t k = 0; k < count; ++k) __builtin_memcpy(scales_of(batch, first + k), &of_row.bits[k], 4);
}

#if defined(__AVX512VBMI__)
// True if 64 numbers of bfloat16 are finite.
PC_FORCE_INLINE bool are_finite_pairs(const char* source) {
  const auto special = [](const char* p) __attribute__((always_inline)) {
    const auto magnitude = (__m512i)((BitVec)_mm512_loadu_si512(p) & 0x7fff7fff);
    return _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80));
  };
  return (special(source) | special(source + kLine)) == 0;
}

// The codes of 64 numbers of bfloat16 times two factors, one for each half, to e4m3. Magnitudes do not round above the
// largest number. Only the low bytes of the sums of small_float_codes() are made, so that the exponents need not be
// subtracted.
PC_FORCE_INLINE void store_e4m3_of_pairs(const char* source, char* codes, Vec first_factor, Vec second_factor) {
  // Even bytes of dwords of two vectors, alternating: to the lower half of a vector. The signs: odd bytes of words.
  static constexpr ByteTable64 kCodes = table_64([](int i) { return i % 32 / 2 * 4 + i % 2 * 64; });
  static constexpr ByteTable64 kSigns = table_64([](int i) { return 2 * i + 1; });
  constexpr __mmask64 kLower = 0xffffffff;
  constexpr auto kLeast = static_cast<uint8_t>((127 - 7 + 1) << 3);
  const auto low_byte = [](BitVec bits, Vec factor) __attribute__((always_inline)) {
    const auto magnitude = (IntVec)((Vec)bits * factor);
    const IntVec exponent = max(magnitude & kInfinityBits, splat_bits((127 - 7 + 1) << 23));
    const auto sum = (IntVec)((Vec)magnitude + (Vec)(exponent + (20 << 23)));
    return (__m512i)(sum + (exponent >> 20));
  };
  const auto codes_of = [&](BitVec words, Vec factor, __mmask64 half) __attribute__((always_inline)) {
    const __m512i even = low_byte(words << 16 & 0x7fffffff, factor), odd = low_byte(words & 0x7fff0000, factor);
    return (Bytes)_mm512_maskz_permutex2var_epi8(half, even, _mm512_load_si512(kCodes.bytes), odd);
  };
  const auto a = (BitVec)_mm512_loadu_si512(source), b = (BitVec)_mm512_loadu_si512(source + kLine);
  const auto signs =
      (Bytes)_mm512_maskz_permutex2var_epi8(~__mmask64{0}, (__m512i)a, _mm512_load_si512(kSigns.bytes), (__m512i)b);
  const Bytes magnitudes = (codes_of(a, first_factor, kLower) | codes_of(b, second_factor, ~kLower)) - kLeast;
  _mm512_storeu_si512(codes, (__m512i)with_sign(magnitudes, signs));
}
#endif

// The codes of a row of finite numbers times a factor, to e4m3. Magnitudes do not round above the largest number.
template <Float From>
PC_FORCE_INLINE void store_finite_e4m3(const char* source, int64_t dim, char* codes, Vec factor) {
#if defined(__AVX512VBMI__)
  if (From == Float::BF16 && dim % 64 == 0) {
    for (int64_t d = 0; d < dim; d += 64) store_e4m3_of_pairs(source + 2 * d, codes + d, factor, factor);
    return;
  }
#endif
  store_row_of_codes<From, 1>(source, dim, codes,
                              [=](Vec v) __attribute__((always_inline)) { return e4m3_codes_inside(v * factor); });
}

template <Float From>
void quantize_float8_token(const RowBatch& batch) {
  for_each_rows(batch, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    PerRow most{}, known, inverse;
    for (int64_t k = 0; k < count; ++k) {
      most.bits[k] = row_magnitude<From, false>(source_of(batch, first + k), batch.dim);
    }
    known = most;
    for (int64_t k = 0; k < count; ++k) {
      if (most.bits[k] <= kInfinityBits) continue;
      known.bits[k] = row_magnitude<From, true>(source_of(batch, first + k), batch.dim);
    }
    const Vec amax = (Vec)min(known.vector, splat_bits(kLargestBits));
    const Vec scale = max(amax / splat(448.0f), splat(1e-6f));
    inverse.floats = splat(1.0f) / scale;
    for (int64_t k = 0; k < count; ++k) {
      char* codes = codes_of(batch, first + k);
      const Vec factor = splat(inverse.numbers[k]);
      const char* source = source_of(batch, first + k);
      if (most.bits[k] <= kLargestBits) {
        store_finite_e4m3<From>(source, batch.dim, codes, factor);
      } else {
        store_row_of_codes<From, 1>(source, batch.dim, codes,
                                    [=](Vec v) __attribute__((always_inline)) { return e4m3_codes(v * factor); });
      }
    }
    store_scales(batch, first, count, (IntVec)scale);
  });
}

template <Float From>
void quantize_int8_token(const RowBatch& batch) {
  for_each_rows(batch, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    PerRow most{}, inverse;
    for (int64_t k = 0; k < count; ++k) {
      most.bits[k] = row_magnitude<From, false>(source_of(batch, first + k), batch.dim);
    }
    const IntVec known = most.vector <= kInfinityBits;
    const Vec scale = max((Vec)min(most.vector, splat_bits(kLargestBits)) / splat(127.0f), splat(1e-6f));
    inverse.floats = (Vec)((IntVec)(splat(1.0f) / scale) & known);
    for (int64_t k = 0; k < count; ++k) {
      char* codes = codes_of(batch, first + k);
      const Vec factor = splat(inverse.numbers[k]);
      const IntVec used = factor > 0.0f;
      store_row_of_codes<From, 1>(source_of(batch, first + k), batch.dim, codes,
                                  [=](Vec v) __attribute__((always_inline)) {
                                    return integer_codes(rounded(v * factor), -128.0f, 127.0f) & used;
                                  });
    }
    store_scales(batch, first, count, select(known, (IntVec)scale, splat_bits(0x7fc00000)));
  });
}

// The least and the largest number of a row and 0; NaN is ignored, and noted.
template <Float From>
PC_FORCE_INLINE bool read_range(const char* source, int64_t dim, float& least, float& largest) {
  Vec low{}, high{};
  IntVec nan{};
  for_each_vector<From>(source, dim, [&](int64_t, Vec v, int64_t) {
    nan = nan | (v != v);
    low = min(v, low);
    high = max(v, high);
  });
  least = -max_of_lanes(-low)[0];
  largest = max_of_lanes(high)[0];
  return any_lane(nan);
}

#if defined(__AVX512BW__)
// The same for a row of bfloat16 whose length is a multiple of 32; false if there is a NaN. As integers, the positive
// numbers have the order of the numbers, and the negative ones, without sign, the opposite order.
PC_FORCE_INLINE bool read_range_of_pairs(const char* source, int64_t dim, float& least, float& largest) {
  auto positive = _mm512_setzero_si512(), negative = (__m512i)(BitVec{} + 0x80008000);
  for (int64_t d = 0; d < dim; d += 2 * kLanes) {
    const __m512i words = _mm512_loadu_si512(source + 2 * d);
    positive = _mm512_maskz_max_epi16(~__mmask32{0}, positive, words);
    negative = _mm512_maskz_max_epu16(~__mmask32{0}, negative, words);
  }
  const auto most = [](BitVec words) __attribute__((always_inline)) {
    return max_of_lanes(max((IntVec)(words << 16 & 0x7fffffff), (IntVec)(words & 0x7fff0000)))[0];
  };
  const int32_t high = most((BitVec)positive), low = most((BitVec)negative);
  const int32_t low_bits = low | static_cast<int32_t>(0x80000000);
  __builtin_memcpy(&largest, &high, sizeof high);
  __builtin_memcpy(&least, &low_bits, sizeof low);
  return high <= kInfinityBits && low <= kInfinityBits;
}
#endif

// read_range(), by read_range_of_pairs() if possible.
template <Float From>
PC_FORCE_INLINE bool read_row_range(const char* source, int64_t dim, float& least, float& largest) {
#if defined(__AVX512BW__)
  if (From == Float::BF16 && dim % (2 * kLanes) == 0 && read_range_of_pairs(source, dim, least, largest)) return false;
#endif
  return read_range<From>(source, dim, least, largest);
}

template <Float From>
void quantize_int4_token(const RowBatch& batch) {
  for_each_rows(batch, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    PerRow low{}, high{}, nan{}, inverse, zero;
    for (int64_t k = 0; k < count; ++k) {
      const char* source = source_of(batch, first + k);
      nan.bits[k] = -static_cast<int32_t>(read_row_range<From>(source, batch.dim, low.numbers[k], high.numbers[k]));
    }
    const Vec largest = (Vec)splat_bits(kLargestBits);
    const Vec least = max(low.floats, -largest);
    const Vec scale = max(min(min(high.floats, largest) - least, largest) / splat(15.0f), splat(1e-6f));
    inverse.floats = splat(1.0f) / scale;
    const IntVec point = integer_codes(rounded(-least * inverse.floats), 0.0f, 15.0f);
    inverse.vector = inverse.vector & ~nan.vector;
    zero.floats = __builtin_convertvector(point, Vec);
    for (int64_t k = 0; k < count; ++k) {
      char* codes = codes_of(batch, first + k);
      const Vec factor = splat(inverse.numbers[k]), shift = splat(zero.numbers[k]);
      const IntVec used = factor > 0.0f;
      store_row_of_codes<From, 2>(
          source_of(batch, first + k), batch.dim, codes,
          [=](Vec v) __attribute__((always_inline)) { return nibble_codes(rounded(v * factor) + shift) & used; });
    }
    store_scales(batch, first, count, select(nan.vector, splat_bits(0x7fc00000), ((IntVec)scale & ~15) | point));
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
