// Rows of numbers to codes and scales: one function for each format, dtype and instruction set.
//
// Numbers are read twice: for the scales of kLanes rows or groups, which are computed as one vector, then for the
// codes.
#pragma once

#include "pagecore/ops/cpu/kernels/codes.hpp"
#include "pagecore/ops/cpu/kernels/convert.hpp"

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

PC_FORCE_INLINE void store_part_of_nibbles(char* row, int64_t offset, IntVec codes, int64_t count) {
  if (count == kLanes) return store_nibbles(row + offset / 2, codes);
  char padded[kLanes];
  store_nibbles(padded, codes);
  __builtin_memcpy(row + offset / 2, padded, static_cast<size_t>(count / 2));
}

// Bits of |v|, which are in the order of the numbers; NaN is above infinity.
PC_FORCE_INLINE IntVec magnitude_bits(Vec v) { return (IntVec)v & kMagnitudeBits; }

// The same with 0 for NaN.
PC_FORCE_INLINE IntVec known_bits(Vec v) {
  const IntVec bits = magnitude_bits(v);
  return bits & (bits <= kInfinityBits);
}

template <Float From, bool kKnown>
PC_FORCE_INLINE int32_t row_magnitude(const char* source, int64_t dim) {
  IntVec most{};
  for_each_vector<From>(source, dim,
                        [&](int64_t, Vec v, int64_t) { most = max(most, kKnown ? known_bits(v) : magnitude_bits(v)); });
  return max_of_lanes(most)[0];
}

// ---- a scale for a row

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

template <Float From>
void quantize_float8_token(const RowBatch& batch) {
  for_each_rows(batch, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    PerRow most{}, inverse;
    for (int64_t k = 0; k < count; ++k) {
      const char* source = source_of(batch, first + k);
      most.bits[k] = row_magnitude<From, false>(source, batch.dim);
      if (most.bits[k] > kInfinityBits) most.bits[k] = row_magnitude<From, true>(source, batch.dim);
    }
    const Vec amax = (Vec)min(most.vector, splat_bits(kLargestBits));
    const Vec scale = max(amax / splat(448.0f), splat(1e-6f));
    inverse.floats = splat(1.0f) / scale;
    for (int64_t k = 0; k < count; ++k) {
      char* codes = codes_of(batch, first + k);
      const Vec factor = splat(inverse.numbers[k]);
      for_each_vector<From>(source_of(batch, first + k), batch.dim, [&](int64_t i, Vec v, int64_t part) {
        store_part_of_codes(codes, i, e4m3_codes(v * factor), part);
      });
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
      for_each_vector<From>(source_of(batch, first + k), batch.dim, [&](int64_t i, Vec v, int64_t part) {
        store_part_of_codes(codes, i, integer_codes(rounded(v * factor), -128.0f, 127.0f) & used, part);
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

template <Float From>
void quantize_int4_token(const RowBatch& batch) {
  for_each_rows(batch, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    PerRow low{}, high{}, nan{}, inverse, zero;
    for (int64_t k = 0; k < count; ++k) {
      const char* source = source_of(batch, first + k);
      nan.bits[k] = -static_cast<int32_t>(read_range<From>(source, batch.dim, low.numbers[k], high.numbers[k]));
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
      for_each_vector<From>(source_of(batch, first + k), batch.dim, [&](int64_t i, Vec v, int64_t part) {
        const IntVec code = integer_codes(rounded(v * factor) + shift, 0.0f, 15.0f);
        store_part_of_nibbles(codes, i, code & used, part);
      });
    }
    store_scales(batch, first, count, select(nan.vector, splat_bits(0x7fc00000), ((IntVec)scale & ~15) | point));
  });
}

// ---- a scale for a group

// Vectors of a group.
template <int kGroup>
constexpr int kParts = kGroup / kLanes;

template <Float From, int kGroup>
PC_FORCE_INLINE void load_group(const char* source, Vec (&group)[kParts<kGroup>]) {
#pragma GCC unroll 8
  for (int i = 0; i < kParts<kGroup>; ++i) group[i] = load_as_float<From>(source + i * kLanes * kSize<From>);
}

// The largest magnitude of a group in each lane modulo its position; of the numbers that are not NaN if kKnown.
template <Float From, int kGroup, bool kKnown>
PC_FORCE_INLINE IntVec group_magnitude(const char* source) {
  Vec group[kParts<kGroup>];
  load_group<From, kGroup>(source, group);
  IntVec most{};
#pragma GCC unroll 8
  for (int i = 0; i < kParts<kGroup>; ++i) most = max(most, kKnown ? known_bits(group[i]) : magnitude_bits(group[i]));
  return most;
}

// The largest lane of each of four vectors, four times each.
#if defined(__AVX512F__)
PC_FORCE_INLINE IntVec max_of_four(IntVec a, IntVec b, IntVec c, IntVec d) {
  const IntVec ab = max(__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                        __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  const IntVec cd = max(__builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                        __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  IntVec v = max(__builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                 __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
}
#endif

// The largest magnitudes of `count` groups, at most kLanes, one a lane; 0 in the others.
template <Float From, int kGroup, bool kKnown>
PC_FORCE_INLINE IntVec group_magnitudes(const char* source, int64_t count) {
  const auto of_group = [&](int64_t i) __attribute__((always_inline)) {
    return group_magnitude<From, kGroup, kKnown>(source + i * kGroup * kSize<From>);
  };
#if defined(__AVX512F__)  // in registers: a load that spans several stores would wait for them
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  IntVec most{};
  int64_t g = 0;
  for (; g + 4 <= count; g += 4) {
    const IntVec four = max_of_four(of_group(g), of_group(g + 1), of_group(g + 2), of_group(g + 3));
    const auto lanes = static_cast<__mmask16>(0xf << g);
    most = (IntVec)_mm512_mask_permutexvar_epi32((__m512i)most, lanes, firsts, (__m512i)four);
  }
  for (; g < count; ++g) {
    most = (IntVec)_mm512_mask_mov_epi32((__m512i)most, static_cast<__mmask16>(1 << g),
                                         (__m512i)max_of_lanes(of_group(g)));
  }
  return most;
#else
  alignas(64) int32_t most[kLanes] = {};
  for (int64_t g = 0; g < count; ++g) most[g] = max_of_lanes(of_group(g))[0];
  return *reinterpret_cast<const IntVec*>(most);
#endif
}

// The biased exponent of the least power of two that is at least amax / largest. `above` is 2^23 less the mantissa bits
// of `largest`, and `exponent` its exponent; the result is at least `floor`.
PC_FORCE_INLINE IntVec ceil_exponent(IntVec amax, int32_t above, int32_t exponent, int32_t floor) {
  return max(((min(amax, splat_bits(kLargestBits)) + (above - 1)) >> 23) - exponent, splat_bits(floor));
}

// 2^(127 - exponent)
PC_FORCE_INLINE Vec inverse_power(IntVec exponent) { return (Vec)((254 - exponent) << 23); }

// Groups whose scales are computed before their codes, so that many divisions and reductions overlap.
constexpr int64_t kGroupBatch = 256;

// Calls scale_of(source, count, bytes, number) for each kLanes groups of a row, which returns the bytes of their scales
// and a number for each; stores the bytes, and calls code(source, codes, number) for each group.
template <Float From, int kGroup, int kCodesPerByte, typename ScaleOf, typename Code>
PC_FORCE_INLINE void for_each_group(const RowBatch& given, ScaleOf&& scale_of, Code&& code) {
  const RowBatch batch = given;  // stores of codes cannot change the copy
  constexpr int64_t kSource = kGroup * kSize<From>, kCodes = kGroup / kCodesPerByte;
  const int64_t groups = batch.dim / kGroup;
  const int64_t rows = groups < kGroupBatch ? kGroupBatch / groups : 1;
  alignas(64) float numbers[kGroupBatch + kLanes];
  for (int64_t first = 0; first < batch.count; first += rows) {
    const int64_t last = first + rows < batch.count ? first + rows : batch.count;
    for (int64_t begin = 0; begin < groups; begin += kGroupBatch) {
      const int64_t end = begin + kGroupBatch < groups ? begin + kGroupBatch : groups;
      float* next = numbers;
      for (int64_t row = first; row < last; ++row) {
        for (int64_t g = begin; g < end; g += kLanes) {
          const int64_t count = end - g < kLanes ? end - g : kLanes;
          IntVec bytes;
          Vec number;
          scale_of(source_of(batch, row) + g * kSource, count, bytes, number);
          store_part_of_codes(scales_of(batch, row), g, bytes, count);
          store(next, number);
          next += count;
        }
      }
      const float* used = numbers;
      for (int64_t row = first; row < last; ++row) {
        const char* source = source_of(batch, row) + begin * kSource;
        char* codes = codes_of(batch, row) + begin * kCodes;
        for (int64_t g = begin; g < end; ++g, source += kSource, codes += kCodes) code(source, codes, splat(*used++));
      }
    }
  }
}

template <Float From>
void quantize_fp4_block16(const RowBatch& batch) {
  const auto scale_of = [](const char* source, int64_t count, IntVec& bytes, Vec& inverse)
                            __attribute__((always_inline)) {
                              const IntVec amax = group_magnitudes<From, 16, false>(source, count);
                              const IntVec known = amax <= kInfinityBits;
                              const IntVec exponent = ceil_exponent(amax, 0x400000, 2, 94);  // 6 is 1.5 * 2^2
                              bytes = select(known, exponent, splat_bits(255));
                              inverse = (Vec)((IntVec)inverse_power(exponent) & known);  // 0 for NaN
                            };
  const auto code = [](const char* source, char* codes, Vec inverse) __attribute__((always_inline)) {
    Vec group[kParts<16>];
    load_group<From, 16>(source, group);
    const IntVec known = inverse > 0.0f;
#pragma GCC unroll 8
    for (int i = 0; i < kParts<16>; ++i) {
      const IntVec sign = (IntVec)(group[i] < 0.0f) & 8;
      store_nibbles(codes + i * kLanes / 2, (e2m1_magnitudes_up(group[i] * inverse) | sign) & known);
    }
  };
  for_each_group<From, 16, 2>(batch, scale_of, code);
}

template <Float From>
void quantize_mxfp8(const RowBatch& batch) {
  const auto scale_of = [](const char* source, int64_t count, IntVec& bytes,
                           Vec& inverse) __attribute__((always_inline)) {
    bytes = ceil_exponent(group_magnitudes<From, 32, true>(source, count), 0x200000, 8, 19);  // 448 is 1.75 * 2^8
    inverse = inverse_power(bytes);
  };
  const auto code = [](const char* source, char* codes, Vec inverse) __attribute__((always_inline)) {
    Vec group[kParts<32>];
    load_group<From, 32>(source, group);
#pragma GCC unroll 8
    for (int i = 0; i < kParts<32>; ++i) store_codes(codes + i * kLanes, e4m3_codes(group[i] * inverse));
  };
  for_each_group<From, 32, 1>(batch, scale_of, code);
}

// The scales of groups whose largest numbers become `most`, e4m3; NaN for a group with NaN.
PC_FORCE_INLINE IntVec nv_scales(IntVec amax, Vec most) {
  return e4m3_codes((Vec)select(amax <= kInfinityBits, min(amax, splat_bits(kLargestBits)), amax) / most);
}

// The codes of a group and a divisor; 0 if the divisor is 0 or NaN.
PC_FORCE_INLINE void nv_codes(const Vec (&group)[kParts<16>], Vec divisor, IntVec (&codes)[kParts<16>]) {
  const IntVec used = divisor > 0.0f;
#pragma GCC unroll 8
  for (int i = 0; i < kParts<16>; ++i) codes[i] = e2m1_codes(group[i] / divisor) & used;
}

template <Float From>
void quantize_nvfp4(const RowBatch& batch) {
  const Vec factors = splat(batch.factor), six = splat(6.0f) * factors;
  const auto scale_of = [=](const char* source, int64_t count, IntVec& bytes, Vec& divisor)
                            __attribute__((always_inline)) {
                              bytes = nv_scales(group_magnitudes<From, 16, false>(source, count), six);
                              divisor = number_of_e4m3(bytes) * factors;
                            };
  const auto code = [](const char* source, char* codes, Vec divisor) __attribute__((always_inline)) {
    Vec group[kParts<16>];
    IntVec code[kParts<16>];
    load_group<From, 16>(source, group);
    nv_codes(group, divisor, code);
#pragma GCC unroll 8
    for (int i = 0; i < kParts<16>; ++i) store_nibbles(codes + i * kLanes / 2, code[i]);
  };
  for_each_group<From, 16, 2>(batch, scale_of, code);
}

// The codes of a group with one scale, and their squared error. `scale` is in all lanes.
PC_FORCE_INLINE float nv_choice(const Vec (&group)[kParts<16>], IntVec scale, Vec factor, IntVec (&codes)[kParts<16>]) {
  const Vec number = number_of_e4m3(scale);
  nv_codes(group, number * factor, codes);
  Vec squares[kParts<16>];
#pragma GCC unroll 8
  for (int i = 0; i < kParts<16>; ++i) {
    const Vec error = group[i] - rounded(rounded(number_of_e2m1(codes[i]) * number) * factor);
    squares[i] = rounded(error * error);
  }
  // In the order of sum(), for vectors of any length.
  for (int half = kParts<16> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) squares[i] += squares[i + half];
  }
  return sum(squares[0]);
}

template <Float From>
void quantize_nvfp4_4over6(const RowBatch& batch) {
  const Vec factors = splat(batch.factor);
  const auto quantize_group = [=](const char* source, char* codes, char* scale) __attribute__((always_inline)) {
    Vec group[kParts<16>];
    IntVec six[kParts<16>], four[kParts<16>];
    load_group<From, 16>(source, group);
    const IntVec amax = max_of_lanes(group_magnitude<From, 16, false>(source));
    const IntVec of_six = nv_scales(amax, splat(6.0f) * factors), of_four = nv_scales(amax, splat(4.0f) * factors);
    const float error = nv_choice(group, of_six, factors, six);
    const bool is_four = nv_choice(group, of_four, factors, four) < error;
#pragma GCC unroll 8
    for (int i = 0; i < kParts<16>; ++i) store_nibbles(codes + i * kLanes / 2, is_four ? four[i] : six[i]);
    *scale = static_cast<char>(is_four ? of_four[0] : of_six[0]);
  };
  for (int64_t row = 0; row < batch.count; ++row) {
    for (int64_t g = 0; g < batch.dim / 16; ++g) {
      quantize_group(source_of(batch, row) + g * 16 * kSize<From>, codes_of(batch, row) + g * 8,
                     scales_of(batch, row) + g);
    }
  }
}

// ---- choice

template <Float From>
PC_FORCE_INLINE QuantizeRows quantizer_from(Format format, bool four_over_six) {
  switch (format) {
    case Format::E4M3Token: return quantize_float8_token<From>;
    case Format::I8Token: return quantize_int8_token<From>;
    case Format::I4Token: return quantize_int4_token<From>;
    case Format::FP4Block16: return quantize_fp4_block16<From>;
    case Format::NVFP4: return four_over_six ? quantize_nvfp4_4over6<From> : quantize_nvfp4<From>;
    default: return quantize_mxfp8<From>;
  }
}

// The function of a format that computes scales.
inline QuantizeRows quantizer(Float from, Format format, bool four_over_six) {
  return with_float(from, [&]<Float From>() { return quantizer_from<From>(format, four_over_six); });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
