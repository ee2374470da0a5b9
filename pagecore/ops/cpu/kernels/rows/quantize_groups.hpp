// Rows of numbers to codes and scales, in the formats with a scale for a group other than NVFP4: one function for each
// dtype.
#pragma once

#include "pagecore/ops/cpu/kernels/rows/group_magnitudes.hpp"
#include "pagecore/ops/cpu/kernels/rows/word_codes.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The biased exponent of the least power of two that is at least amax / largest. `above` is 2^23 less the mantissa bits
// of `largest`, and `exponent` its exponent; the result is at least `floor`.
PC_FORCE_INLINE IntVec ceil_exponent(IntVec amax, int32_t above, int32_t exponent, int32_t floor) {
  return max(((min(amax, splat_bits(kLargestBits)) + (above - 1)) >> 23) - exponent, splat_bits(floor));
}

// 2^(127 - exponent)
PC_FORCE_INLINE Vec inverse_power(IntVec exponent) { return (Vec)((254 - exponent) << 23); }

// Groups whose scales are computed before their codes, so that many divisions and reductions overlap.
constexpr int64_t kGroupBatch = 256;

// The numbers of the groups of a batch.
struct GroupNumbers {
  alignas(64) int32_t magnitudes[kGroupBatch + kLanes];
  alignas(64) float factors[kGroupBatch + kLanes];
  alignas(64) float extras[kGroupBatch + kLanes];
  alignas(64) char scales[kGroupBatch + kLanes];
};

// The rows [first, last) of a batch, and in each the groups [begin, begin + width).
struct GroupRange {
  int64_t first;
  int64_t last;
  int64_t begin;
  int64_t width;
};

// Copies an integer of type T; its value is hidden from GCC, which would replace a loop of copies by a slower call.
template <typename T>
PC_FORCE_INLINE void copy_integer(char* to, const char* from) {
  T bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  asm("" : "+r"(bytes));
  __builtin_memcpy(to, &bytes, sizeof bytes);
}

// Copies the bytes of the scales of a row.
PC_FORCE_INLINE void copy_scales(char* to, const char* from, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) copy_integer<uint64_t>(to + i, from + i);
  if (i + 4 <= count) copy_integer<uint32_t>(to + i, from + i), i += 4;
  for (; i < count; ++i) copy_integer<uint8_t>(to + i, from + i);
}

// Clears the codes of groups whose factor is 0 or NaN.
template <int64_t kCodes>
void clear_unused(char* codes, const float* factors, int64_t groups) {
  for (int64_t g = 0; g < groups; ++g) {
    if (!(factors[g] > 0.0f)) __builtin_memset(codes + g * kCodes, 0, kCodes);
  }
}

// Lists the largest magnitudes of groups, of the numbers that are not NaN if kKnown, and returns their number.
// `largest` becomes the largest of them, one a lane, and of numbers of other groups.
template <Float From, int kGroup, bool kKnown>
PC_FORCE_INLINE int64_t list_magnitudes_of(const RowBatch& batch, const GroupRange& range, int32_t* magnitudes,
                                           IntVec& largest) {
  constexpr int64_t kMost = kMagnitudes<From, kGroup>, kSource = kGroup * kSize<From>;
  int64_t total = 0;
  largest = IntVec{};
  for (int64_t row = range.first; row < range.last; ++row) {
    const char* source = source_of(batch, row) + range.begin * kSource;
    if constexpr (!kKnown) fetch_next_source(batch, row, range.width * kSource);
    for (int64_t g = 0; g < range.width; g += kMost) {
      const int64_t count = range.width - g < kMost ? range.width - g : kMost;
      const IntVec most = kKnown ? magnitudes_of_groups<From, kGroup, true>(source + g * kSource, count)
                                 : group_magnitudes<From, kGroup>(source + g * kSource, count);
      largest = max(largest, most);
      store(reinterpret_cast<float*>(magnitudes + total), (Vec)most);
      total += count;
    }
  }
  return total;
}

template <Float From, int kGroup>
[[gnu::noinline]] void list_known_magnitudes(const RowBatch& batch, const GroupRange& range, int32_t* magnitudes) {
  IntVec largest;
  list_magnitudes_of<From, kGroup, true>(batch, range, magnitudes, largest);
}

// list_magnitudes_of(), which also sets `is_finite` to false if a number is not finite.
template <Float From, int kGroup, bool kKnown>
PC_FORCE_INLINE int64_t list_magnitudes(const RowBatch& batch, const GroupRange& range, int32_t* magnitudes,
                                        bool& is_finite) {
  IntVec largest;
  const int64_t total = list_magnitudes_of<From, kGroup, false>(batch, range, magnitudes, largest);
  is_finite = !any_lane(largest > kLargestBits);
  if (kKnown && any_lane(largest > kInfinityBits)) [[unlikely]]
    list_known_magnitudes<From, kGroup>(batch, range, magnitudes);
  return total;
}

// Stores the codes and scales of groups; see for_each_group().
template <Float From, int kGroup, int kCodesPerByte, typename CodesOfQuad>
PC_FORCE_INLINE void store_groups(const RowBatch& batch, const GroupRange& range, const GroupNumbers& numbers,
                                  bool any_unused, CodesOfQuad&& codes_of_quad) {
  constexpr int64_t kSource = kGroup * kSize<From>, kCodes = kGroup / kCodesPerByte;
  const float *factors = numbers.factors, *extras = numbers.extras;
  const char* scales = numbers.scales;
  for (int64_t row = range.first; row < range.last; ++row) {
    char* const codes = codes_of(batch, row) + range.begin * kCodes;
    fetch_next_target(batch, row, range.width * kCodes);
    copy_scales(scales_of(batch, row) + range.begin, scales, range.width);
    store_quads<From, kCodesPerByte>(source_of(batch, row) + range.begin * kSource, range.width * kGroup, codes,
                                     [&](const char* from, int64_t d) __attribute__((always_inline)) {
                                       return codes_of_quad(from, factors + d / kGroup, extras + d / kGroup);
                                     });
    if (any_unused) [[unlikely]]
      clear_unused<kCodes>(codes, factors, range.width);
    factors += range.width, extras += range.width, scales += range.width;
  }
}

// For each batch of groups lists the largest magnitudes, of the numbers that are not NaN if kKnown; then, a vector of
// groups at a time, calls scale_of(magnitudes, scales, factor, extra), which writes the bytes of the scales, a factor
// and an extra number for each, and returns a mask of unusual groups; then stores the codes, which codes_of(is_usual)
// returns as a function of a quad, the factors and the extra numbers. `is_usual` is true if all numbers are finite and
// no group is unusual. Codes of a group whose factor is 0 or NaN are 0.
template <Float From, int kGroup, int kCodesPerByte, bool kKnown, typename ScaleOf, typename CodesOf>
PC_FORCE_INLINE void for_each_group(const RowBatch& given, ScaleOf&& scale_of, CodesOf&& codes_of) {
  const RowBatch batch = given;  // stores of codes cannot change the copy
  const int64_t groups = batch.dim / kGroup;
  const int64_t rows = groups < kGroupBatch ? kGroupBatch / groups : 1;
  GroupNumbers numbers;
  store(numbers.extras + kGroupBatch, Vec{});
  for (int64_t first = 0; first < batch.count; first += rows) {
    const int64_t last = first + rows < batch.count ? first + rows : batch.count;
    for (int64_t begin = 0; begin < groups; begin += kGroupBatch) {
      const GroupRange range{first, last, begin, groups - begin < kGroupBatch ? groups - begin : kGroupBatch};
      bool is_finite;
      const int64_t total = list_magnitudes<From, kGroup, kKnown>(batch, range, numbers.magnitudes, is_finite);
      // The lanes after the last group repeat it, so that they are not unusual or unused unless it is.
      store(reinterpret_cast<float*>(numbers.magnitudes + total), (Vec)splat_bits(numbers.magnitudes[total - 1]));
      IntVec unused{}, unusual{};
      for (int64_t i = 0; i < total; i += kLanes) {
        IntVec scales;
        Vec factor, extra{};
        unusual |=
            scale_of((IntVec)load(reinterpret_cast<const float*>(numbers.magnitudes + i)), scales, factor, extra);
        unused |= ~(factor > 0.0f);
        store_codes(numbers.scales + i, scales);
        store(numbers.factors + i, factor);
        store(numbers.extras + i, extra);
      }
      const auto store_all = [&](auto usual) __attribute__((always_inline)) {
        store_groups<From, kGroup, kCodesPerByte>(batch, range, numbers, any_lane(unused), codes_of(usual));
      };
      if (is_finite && !any_lane(unusual)) {
        store_all(std::true_type{});
      } else {
        store_all(std::false_type{});
      }
    }
  }
}

// True for groups of float16 whose `used` is above 0 and whose divisor is below `least`. Numbers of other types have no
// such groups. A group with `used` 0 has codes of 0 only.
template <Float From>
PC_FORCE_INLINE IntVec needs_floats([[maybe_unused]] Vec used, [[maybe_unused]] Vec divisor,
                                    [[maybe_unused]] float least) {
  if constexpr (From == Float::F16) return (used > 0.0f) & (divisor < least);
  return IntVec{};
}

// The codes of e2m1 change first at a quarter of the divisor. With this divisor, a quarter is 2^-14, and no code
// depends on the words of smaller numbers.
constexpr float kLeastE2m1Divisor = 0x1p-12f;

// e4m3_quad_of_words() gives the right codes with any scale. With scales below this one it finds small numbers of
// float16 in most quads, and floats are faster.
constexpr float kLeastE4m3Scale = 0x1p-16f;

template <Float From>
void quantize_fp4_block16(const RowBatch& batch) {
  const auto scale_of = [](IntVec amax, IntVec& bytes, Vec& four, Vec& offset) __attribute__((always_inline)) {
    const IntVec known = amax <= kInfinityBits;
    const IntVec exponent = ceil_exponent(amax, 0x400000, 2, 94);  // 6 is 1.5 * 2^2
    bytes = select(known, exponent, splat_bits(255));
    four = (Vec)((IntVec)inverse_power(exponent - 2) & known);  // 4 / scale; 0 for NaN
    offset = (Vec)e2m1_offset_pair<From>(exponent);
    return needs_floats<From>((Vec)amax, inverse_power(254 - exponent), kLeastE2m1Divisor);
  };
  const auto codes_of = [](auto usual) {
    return [](const char* from, const float* fours, const float* offsets) __attribute__((always_inline)) {
      if constexpr (kIsWord<From> && decltype(usual)::value) {
        return e2m1_quad_of_words<From>(
            from, [=](int half) __attribute__((always_inline)) { return half_quad_words<16>(offsets, half); });
      } else {
        return e2m1_quad_up<From>(
            from, [=](Vec v, int i) __attribute__((always_inline)) { return v * quad_factor<From, 16>(fours, i); });
      }
    };
  };
  for_each_group<From, 16, 2, false>(batch, scale_of, codes_of);
}

template <Float From, bool kFinite>
PC_FORCE_INLINE Bytes mx_quad(const char* from, const float* inverses) {
  return float8_quad<E4M3, From, kFinite>(
      from, [=](Vec v, int i) __attribute__((always_inline)) { return v * quad_factor<From, 32>(inverses, i); });
}

// Out of line: its constants would take the registers of the usual case.
template <Float From>
[[gnu::noinline, gnu::cold]] Bytes mx_quad_apart(const char* from, const float* inverses) {
  return mx_quad<From, true>(from, inverses);
}

template <Float From>
void quantize_mxfp8(const RowBatch& batch) {
  const auto scale_of = [](IntVec amax, IntVec& bytes, Vec& inverse, Vec& offset) __attribute__((always_inline)) {
    bytes = ceil_exponent(amax, 0x200000, 8, 19);  // 448 is 1.75 * 2^8
    inverse = inverse_power(bytes);
    offset = (Vec)e4m3_offset_pair(bytes);
    return needs_floats<From>((Vec)amax, inverse_power(254 - bytes), kLeastE4m3Scale);
  };
  const auto codes_of = [](auto usual) {
    return [](const char* from, const float* inverses, const float* offsets) __attribute__((always_inline)) {
      constexpr bool kFinite = decltype(usual)::value;
      if constexpr (kIsWord<From> && kFinite) {
        return e4m3_quad_of_words<From>(
            from, [=](int half) __attribute__((always_inline)) { return half_quad_words<32>(offsets, half); },
            [=]() __attribute__((always_inline)) { return mx_quad_apart<From>(from, inverses); });
      } else {
        return mx_quad<From, kFinite>(from, inverses);
      }
    };
  };
  for_each_group<From, 32, 1, true>(batch, scale_of, codes_of);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
