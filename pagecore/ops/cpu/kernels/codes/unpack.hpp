// Rows of a quantised cache as bfloat16, exactly: codes times the scales of their groups. Factors of tokens and heads
// are left to the softmax.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/unpack_float8.hpp"
#include "pagecore/ops/cpu/kernels/codes/unpack_nibbles.hpp"
#include "pagecore/ops/cpu/kernels/tiles/prefetch.hpp"
#include "pagecore/ops/cpu/kernels/tiles/tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

PC_FORCE_INLINE bool is_plain(const Cache& cache) { return cache.format == Format::Plain; }

// Calls visit(row of codes, row of scales, target) for each token in use, and prefetches the next rows.
template <typename Visit>
PC_FORCE_INLINE void for_each_stored_row(const TokenRows& codes, const TokenRows& scales, const TileUse& use,
                                         const NextRows& next_rows, uint16_t* rows, int64_t stride, Visit&& visit) {
  for (int t = use.first; t < use.last; ++t) {
    prefetch_row(next_rows, t);
    if (use.used != nullptr && use.used[t] == 0) continue;
    const char* scale = scales.base == nullptr ? nullptr : scales.base + scales.offsets[t];
    visit(codes.base + codes.offsets[t], reinterpret_cast<const uint8_t*>(scale), rows + t * stride);
  }
}

// Calls put(d, words) for the vectors of bfloat16 from each number d of a row of codes of 8 bits.
template <typename Unpacker, typename Put>
PC_FORCE_INLINE void unpack_row(const Unpacker& unpacker, const char* codes, int64_t dim, Put&& put) {
  int64_t d = 0;
  for (; d + kByteLanes <= dim; d += kByteLanes) {
    unpacker.unpack(load_bytes(codes + d, kByteLanes),
                    [&](int first, Words words) __attribute__((always_inline)) { put(d + first, words); });
  }
  if (d == dim) return;
  unpacker.unpack(load_bytes(codes + d, dim - d),
                  [&](int first, Words words) __attribute__((always_inline)) { put(d + first, words); });
}

// Codes of 8 bits without scales of groups.
template <typename Unpacker>
inline void unpack_bytes(const TokenRows& codes, const TileUse& use, const NextRows& next_rows, int64_t dim,
                         uint16_t* rows, int64_t stride) {
  const Unpacker unpacker;
  for_each_stored_row(codes, {}, use, next_rows, rows, stride,
                      [&](const char* from, const uint8_t*, uint16_t* to) __attribute__((always_inline)) {
                        unpack_row(unpacker, from, dim, [to](int64_t d, Words words) __attribute__((always_inline)) {
                          store_words(to + d, words);
                        });
                      });
}

// e4m3 with a scale for each 32 numbers.
inline void unpack_mxfp8(const TokenRows& codes, const TokenRows& scales, const float (&numbers)[256],
                         const TileUse& use, const NextRows& next_rows, int64_t dim, uint16_t* rows, int64_t stride) {
  constexpr int64_t kGroup = 32;
  const Float8Unpacker<E4M3Code> unpacker;
  for_each_stored_row(codes, scales, use, next_rows, rows, stride,
                      [&](const char* from, const uint8_t* scale, uint16_t* to) __attribute__((always_inline)) {
                        unpack_row(unpacker, from, dim, [&](int64_t d, Words words) __attribute__((always_inline)) {
                          if (d >= dim) return;
                          const float factor = numbers[scale[d / kGroup]];
                          store_words(to + d, high_halves(even_floats(words) * factor, odd_floats(words) * factor));
                        });
                      });
}

#if defined(__AVX512VBMI__)

constexpr int integer_bits(int number) {
  return static_cast<int>(__builtin_bit_cast(uint32_t, static_cast<float>(number)) >> 16);
}

// A magnitude has 128 values and 0x80, the code of -128.
class Int8Unpacker {
 public:
  template <typename Put>
  PC_FORCE_INLINE void unpack(Bytes codes, Put&& put) const {
    put_words(bytes_of(spread(codes)), put);
  }
  // The magnitudes 0 and 128 share their entries: their low bytes are equal, and the high byte of 0 is masked.
  PC_FORCE_INLINE BytePair bytes_of(Bytes codes) const {
    const auto magnitude = (Bytes)_mm512_maskz_abs_epi8(~__mmask64{0}, (__m512i)codes);
    const __mmask64 others = _mm512_test_epi8_mask((__m512i)codes, (__m512i)codes);
    return {look_up_128(low_, magnitude), with_sign(look_up_128(high_, magnitude, others), codes)};
  }

 private:
  static constexpr ByteTable128 kLow = table_128([](int code) { return integer_bits(code) & 0xff; });
  static constexpr ByteTable128 kHigh = table_128([](int code) { return integer_bits(code == 0 ? 128 : code) >> 8; });

  const WideTable low_{kLow}, high_{kHigh};
};

#else

class Int8Unpacker {
 public:
  template <typename Put>
  PC_FORCE_INLINE void unpack(Bytes codes, Put&& put) const {
    typedef int8_t Half __attribute__((vector_size(kWordLanes)));
    Half halves[2];
    __builtin_memcpy(halves, &codes, sizeof codes);
    put(0, widened(halves[0]));
    put(kWordLanes, widened(halves[1]));
  }

 private:
  template <typename Half>
  PC_FORCE_INLINE static Words widened(Half codes) {
    typedef int16_t Shorts __attribute__((vector_size(kByteLanes)));
    const auto pairs = (IntVec) __builtin_convertvector(codes, Shorts);
    return high_halves(__builtin_convertvector(pairs << 16 >> 16, Vec), __builtin_convertvector(pairs >> 16, Vec));
  }
};

#endif

inline void unpack_int4(const TokenRows& codes, const TokenRows& scales, const CodeTable (&tables)[16],
                        const TileUse& use, const NextRows& next_rows, int64_t dim, uint16_t* rows, int64_t stride) {
  for_each_stored_row(codes, scales, use, next_rows, rows, stride,
                      [&](const char* from, const uint8_t* scale, uint16_t* to) __attribute__((always_inline)) {
                        uint32_t bits;
                        __builtin_memcpy(&bits, scale, sizeof bits);
                        const CodeTable& table = tables[bits & 15];
                        unpack_nibbles(
                            from, dim / 2,
                            [&](int64_t) __attribute__((always_inline)) -> const CodeTable& { return table; }, to);
                      });
}

// e2m1 with a scale for each 16 numbers; `tables` has the numbers for each scale byte.
inline void unpack_e2m1(const TokenRows& codes, const TokenRows& scales, const CodeTable (&tables)[256],
                        const TileUse& use, const NextRows& next_rows, int64_t dim, uint16_t* rows, int64_t stride) {
  for_each_stored_row(
      codes, scales, use, next_rows, rows, stride,
      [&](const char* from, const uint8_t* scale, uint16_t* to) __attribute__((always_inline)) {
        unpack_nibbles(
            from, dim / 2,
            [&](int64_t group) __attribute__((always_inline)) -> const CodeTable& { return tables[scale[group]]; }, to);
      });
}

// Writes the tokens in use to rows [64, stride]; the other rows are left as they are.
inline void unpack_rows(const Cache& cache, const CodeTables& tables, const TokenRows& codes, const TokenRows& scales,
                        const TileUse& use, const NextRows& next_rows, uint16_t* rows, int64_t stride) {
  switch (cache.format) {
    case Format::Plain: break;
    case Format::E4M3:
    case Format::E4M3Token:
      return unpack_bytes<Float8Unpacker<E4M3Code>>(codes, use, next_rows, cache.dim, rows, stride);
    case Format::E5M2: return unpack_bytes<Float8Unpacker<E5M2Code>>(codes, use, next_rows, cache.dim, rows, stride);
    case Format::I8Token: return unpack_bytes<Int8Unpacker>(codes, use, next_rows, cache.dim, rows, stride);
    case Format::I4Token:
      return unpack_int4(codes, scales, tables.zero_points, use, next_rows, cache.dim, rows, stride);
    case Format::FP4Block16: return unpack_e2m1(codes, scales, tables.ue8m0, use, next_rows, cache.dim, rows, stride);
    case Format::NVFP4: return unpack_e2m1(codes, scales, tables.e4m3, use, next_rows, cache.dim, rows, stride);
    case Format::MXFP8:
      return unpack_mxfp8(codes, scales, tables.ue8m0_numbers, use, next_rows, cache.dim, rows, stride);
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
