// Rows of numbers to codes and scales, in the formats with a scale a row: one function for each dtype.
//
// Numbers are read twice: for the scales of kLanes rows or groups, which are computed as one vector, then for the
// codes.
#pragma once

#include "pagecore/ops/cpu/kernels/rows/quad_codes.hpp"
#include "pagecore/ops/cpu/kernels/simd/lines.hpp"

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
  // Bytes from a row to the one that is prefetched meanwhile; 0 to prefetch nothing.
  int64_t next_source = 0;
  int64_t next_codes = 0;
  int64_t next_scales = 0;
};

using QuantizeRows = void (*)(const RowBatch&);

// Bits of |v|, with 0 for NaN.
PC_FORCE_INLINE IntVec known_bits(Vec v) {
  const IntVec bits = magnitude_bits(v);
  return bits & (bits <= kInfinityBits);
}

// True for numbers of 16 bits. Their magnitudes have the order of the words.
template <Float From>
constexpr bool kIsWord = kSize<From> == 2;

// Magnitudes of numbers of 16 bits, one in each dword, as bits of float32.
template <Float From>
PC_FORCE_INLINE IntVec float_bits(IntVec magnitudes) {
  if constexpr (From == Float::BF16) return (IntVec)((BitVec)magnitudes << 16);
  return (IntVec)widen_f16(__builtin_convertvector(magnitudes, HalfVec));
}

// The larger of the two magnitudes of each dword, as bits of float32.
template <Float From>
PC_FORCE_INLINE IntVec larger_of_pairs(Words magnitudes) {
  if constexpr (From == Float::BF16) return max((IntVec)even_floats(magnitudes), (IntVec)odd_floats(magnitudes));
  return float_bits<From>(max((IntVec)((BitVec)magnitudes & 0xffff), (IntVec)((BitVec)magnitudes >> 16)));
}

// Calls visit(words) for the vectors of a row of numbers of 16 bits. The last ends with the row, so that it may repeat
// words of the one before it.
template <typename Visit>
PC_FORCE_INLINE void for_each_words(const char* source, int64_t dim, Visit&& visit) {
  int64_t d = 0;
  for (; d + kWordLanes <= dim; d += kWordLanes) visit(load_words(source + 2 * d));
  if (d < dim) visit(load_words(source + 2 * (dim - kWordLanes)));
}

// The largest magnitude of a row, as bits of float32; of the numbers that are not NaN if kKnown.
template <Float From, bool kKnown>
PC_FORCE_INLINE int32_t row_magnitude(const char* source, int64_t dim) {
  if (kIsWord<From> && !kKnown && dim >= kWordLanes) {
    Words most{};
    for_each_words(source, dim, [&](Words words) __attribute__((always_inline)) { most = max(most, words & 0x7fff); });
    return max_of_lanes(larger_of_pairs<From>(most))[0];
  }
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

// Prefetches the source, or the targets, of the row after this one. A row at a time, between the arithmetic: a long
// list of prefetches waits for memory.
PC_FORCE_INLINE void fetch_next_source(const RowBatch& batch, int64_t row, int64_t bytes) {
  if (batch.next_source != 0) prefetch_bytes(source_of(batch, row) + batch.next_source, bytes);
}
PC_FORCE_INLINE void fetch_next_target(const RowBatch& batch, int64_t row, int64_t bytes) {
  if (batch.next_codes == 0) return;
  prefetch_bytes(codes_of(batch, row) + batch.next_codes, bytes);
  prefetch_line(scales_of(batch, row) + batch.next_scales);
}

PC_FORCE_INLINE void store_scales(const RowBatch& batch, int64_t first, int64_t count, IntVec scales) {
  PerRow of_row;
  of_row.vector = scales;
  for (int64_t k = 0; k < count; ++k) __builtin_memcpy(scales_of(batch, first + k), &of_row.bits[k], 4);
}

// Stores the codes of e4m3 of a row times a factor. With kInside, no magnitude rounds above the largest number, and
// none is NaN.
template <Float From, bool kInside>
PC_FORCE_INLINE void store_e4m3_row(const char* source, int64_t dim, char* codes, Vec factor) {
  store_quads<From, 1>(source, dim, codes, [=](const char* from, int64_t) __attribute__((always_inline)) {
    return float8_quad<E4M3, From, kInside>(from,
                                            [=](Vec v, int) __attribute__((always_inline)) { return v * factor; });
  });
}

template <Float From>
void quantize_float8_token(const RowBatch& batch) {
  for_each_rows(batch, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    PerRow most{}, known, inverse;
    for (int64_t k = 0; k < count; ++k) {
      fetch_next_source(batch, first + k, batch.dim * kSize<From>);
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
      fetch_next_target(batch, first + k, batch.dim);
      char* codes = codes_of(batch, first + k);
      const Vec factor = splat(inverse.numbers[k]);
      const char* source = source_of(batch, first + k);
      if (most.bits[k] <= kLargestBits) {
        store_e4m3_row<From, true>(source, batch.dim, codes, factor);
      } else {
        store_e4m3_row<From, false>(source, batch.dim, codes, factor);
      }
    }
    store_scales(batch, first, count, (IntVec)scale);
  });
}

// Stores the codes of a row times a factor; zeros if its largest magnitude is NaN.
template <Float From>
PC_FORCE_INLINE void store_int8_row(const char* source, int64_t dim, char* codes, Vec factor, int32_t magnitude) {
  const auto store = [=]<bool kInside>() __attribute__((always_inline)) {
    store_quads<From, 1>(source, dim, codes, [=](const char* from, int64_t) __attribute__((always_inline)) {
      return int8_quad<From, kInside>(from, factor);
    });
  };
  if (magnitude <= kLargestBits) [[likely]] {
    store.template operator()<true>();
  } else if (magnitude == kInfinityBits) {
    store.template operator()<false>();
  } else {
    __builtin_memset(codes, 0, static_cast<size_t>(dim));
  }
}

template <Float From>
void quantize_int8_token(const RowBatch& batch) {
  for_each_rows(batch, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    PerRow most{}, inverse;
    for (int64_t k = 0; k < count; ++k) {
      fetch_next_source(batch, first + k, batch.dim * kSize<From>);
      most.bits[k] = row_magnitude<From, false>(source_of(batch, first + k), batch.dim);
    }
    const IntVec known = most.vector <= kInfinityBits;
    const Vec scale = max((Vec)min(most.vector, splat_bits(kLargestBits)) / splat(127.0f), splat(1e-6f));
    inverse.floats = splat(1.0f) / scale;
    for (int64_t k = 0; k < count; ++k) {
      fetch_next_target(batch, first + k, batch.dim);
      store_int8_row<From>(source_of(batch, first + k), batch.dim, codes_of(batch, first + k),
                           splat(inverse.numbers[k]), most.bits[k]);
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

// read_range() of a row of at least kWordLanes numbers of 16 bits. As integers, the positive numbers have the order of
// the numbers, and the negative ones, without sign, the opposite order.
template <Float From>
PC_FORCE_INLINE bool read_range_of_pairs(const char* source, int64_t dim, float& least, float& largest) {
  Words positive{}, negative = Words{} + 0x8000;
  for_each_words(source, dim, [&](Words words) __attribute__((always_inline)) {
    positive = max_signed(positive, words);
    negative = max(negative, words);
  });
  const int32_t high = max_of_lanes(larger_of_pairs<From>(positive))[0];
  const int32_t low = max_of_lanes(larger_of_pairs<From>(negative & 0x7fff))[0];
  const int32_t low_bits = low | static_cast<int32_t>(0x80000000);
  __builtin_memcpy(&largest, &high, sizeof high);
  __builtin_memcpy(&least, &low_bits, sizeof low);
  return high > kInfinityBits || low > kInfinityBits;
}

// read_range(), by read_range_of_pairs() if possible.
template <Float From>
PC_FORCE_INLINE bool read_row_range(const char* source, int64_t dim, float& least, float& largest) {
  if constexpr (kIsWord<From>) {
    if (dim >= kWordLanes && !read_range_of_pairs<From>(source, dim, least, largest)) return false;
  }
  return read_range<From>(source, dim, least, largest);
}

// Stores the codes of a row times a factor plus a shift; zeros if the factor is 0.
template <Float From>
PC_FORCE_INLINE void store_int4_row(const char* source, int64_t dim, char* codes, float factor, float shift,
                                    bool is_finite) {
  const auto store = [=]<bool kInside>() __attribute__((always_inline)) {
    store_quads<From, 2>(source, dim, codes, [=](const char* from, int64_t) __attribute__((always_inline)) {
      return nibble_quad<From, kInside>(from, splat(factor), splat(shift));
    });
  };
  if (factor == 0.0f) [[unlikely]] {
    __builtin_memset(codes, 0, static_cast<size_t>(dim / 2));
  } else if (is_finite) [[likely]] {
    store.template operator()<true>();
  } else {
    store.template operator()<false>();
  }
}

template <Float From>
void quantize_int4_token(const RowBatch& batch) {
  for_each_rows(batch, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    PerRow low{}, high{}, nan{}, inverse, zero;
    for (int64_t k = 0; k < count; ++k) {
      const char* source = source_of(batch, first + k);
      fetch_next_source(batch, first + k, batch.dim * kSize<From>);
      nan.bits[k] = -static_cast<int32_t>(read_row_range<From>(source, batch.dim, low.numbers[k], high.numbers[k]));
    }
    const Vec largest = splat(kLargest);
    const Vec least = max(low.floats, -largest);
    const Vec scale = max(min(min(high.floats, largest) - least, largest) / splat(15.0f), splat(1e-6f));
    inverse.floats = splat(1.0f) / scale;
    const IntVec point = integer_codes(rounded(-least * inverse.floats), 0.0f, 15.0f);
    inverse.vector = inverse.vector & ~nan.vector;
    zero.floats = __builtin_convertvector(point, Vec);
    for (int64_t k = 0; k < count; ++k) {
      fetch_next_target(batch, first + k, batch.dim / 2);
      const bool is_finite = low.numbers[k] >= -kLargest && high.numbers[k] <= kLargest;
      store_int4_row<From>(source_of(batch, first + k), batch.dim, codes_of(batch, first + k), inverse.numbers[k],
                           zero.numbers[k], is_finite);
    }
    store_scales(batch, first, count, select(nan.vector, splat_bits(0x7fc00000), ((IntVec)scale & ~15) | point));
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
