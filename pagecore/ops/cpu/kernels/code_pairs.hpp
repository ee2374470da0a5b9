// Codes of a quantised tile as pairs of bfloat16, in registers: four operands of 16 pairs for each 64 codes.
//
//   keys     a quarter of a vector holds the codes of a token; a pair is two numbers of the token
//   values   a pair is the numbers of two tokens at one dim; operand k holds the dims 16 k .. 16 k + 15
//
// Numbers of formats with scales of groups are not scaled here.
#pragma once

#include "pagecore/ops/cpu/kernels/stored_tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512VBMI__)

// Dims of the operands that one step over values makes.
constexpr int64_t kValueDims = 64;

// Codes of 64 dims of two tokens, in an order that depends on the format, and the shifts of their indices.
struct ValueCodes {
  Bytes halves[2];
  Bytes shift;
};

// ---- codes of 8 bits

// Codes whose bytes of bfloat16 come from `Unpacker`.
template <typename Unpacker>
class BytePairs {
 public:
  static constexpr int64_t kChunkDims = 32;
  static constexpr int kSteps = 1;

  PC_FORCE_INLINE explicit BytePairs(const StoredTile&) {}
  PC_FORCE_INLINE void set_tokens(int) {}

  PC_FORCE_INLINE BytePair keys(Bytes codes, int, int) const { return unpacker_.bytes_of(codes); }

  // The codes of 64 dims of two tokens, interleaved.
  PC_FORCE_INLINE ValueCodes values(const StoredTile& tile, int t, int64_t d) const {
    // Dword 4 k + i becomes dword k of part i, so that interleaving within parts gives the natural order.
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const auto codes = [&](const char* row) __attribute__((always_inline)) {
      return (Bytes)_mm512_maskz_permutexvar_epi32(kAllLanes, order, _mm512_loadu_si512(row + d));
    };
    const Bytes a = codes(tile.codes[t]), b = codes(tile.codes[t + 1]);
    return {{(Bytes)zip_low(a, b), (Bytes)zip_high(a, b)}, Bytes{}};
  }
  // The bytes of the numbers of 32 dims.
  PC_FORCE_INLINE BytePair numbers_of(const ValueCodes& given, int half) const {
    return unpacker_.bytes_of(given.halves[half]);
  }

 private:
  const Unpacker unpacker_{};
};

// ---- codes of 4 bits

// Order of 16 bytes of two rows: dword 4 i + j of the result has byte 2 i + j of both for j < 2, else byte 6 + 2 i + j.
struct NibbleOrder {
  alignas(64) uint8_t bytes[64];
};

constexpr NibbleOrder make_nibble_order(int first) {
  NibbleOrder order{};
  for (int i = 0; i < 64; ++i) {
    const int part = i / 16, dword = i / 4 % 4, row = i % 4;
    order.bytes[i] = static_cast<uint8_t>(row < 2 ? 32 * row + first + 2 * part + (dword < 2 ? dword : 6 + dword) : 0);
  }
  return order;
}

// e2m1, by a table of 16 numbers.
class E2M1Bytes {
 public:
  PC_FORCE_INLINE explicit E2M1Bytes(const StoredTile& tile)
      : low_(repeat(tile.tables.ue8m0[127].low)), high_(repeat(tile.tables.ue8m0[127].high)) {}
  PC_FORCE_INLINE void set_tokens(int) {}
  PC_FORCE_INLINE Bytes of_quarters(int) const { return Bytes{}; }
  PC_FORCE_INLINE Bytes of_two(int) const { return Bytes{}; }
  PC_FORCE_INLINE BytePair bytes_of(Bytes nibbles, Bytes) const {
    return {look_up(low_, nibbles), look_up(high_, nibbles)};
  }

 private:
  const Bytes low_, high_;
};

// int4, by a table of the numbers -15 .. 15. The index of a code is shifted by 15 minus the zero point of its token.
class Int4Bytes {
 public:
  PC_FORCE_INLINE explicit Int4Bytes(const StoredTile& tile) {
    alignas(64) uint32_t scales[kTileTokens];
    for (int t = 0; t < kTileTokens; ++t) __builtin_memcpy(&scales[t], tile.scales[t], 4);
    for (int t = 0; t < kTileTokens; t += kLanes) {
      const BitVec shift = 15 - (*reinterpret_cast<const BitVec*>(scales + t) & 15);
      *reinterpret_cast<BitVec*>(shifts_ + t) = shift;
    }
  }
  PC_FORCE_INLINE void set_tokens(int t) { tokens_ = *reinterpret_cast<const Bytes*>(shifts_ + t); }
  // The shifts of the tokens k, k + 4, k + 8, k + 12, one a quarter.
  PC_FORCE_INLINE Bytes of_quarters(int k) const { return look_up(tokens_, Bytes{} + static_cast<uint8_t>(4 * k)); }
  // Those of two tokens: bytes {t, t + 1, t, t + 1 ...}
  PC_FORCE_INLINE Bytes of_two(int t) const { return (Bytes)(BitVec{} + (shifts_[t] | shifts_[t + 1] << 8) * 0x10001); }
  PC_FORCE_INLINE BytePair bytes_of(Bytes nibbles, Bytes shift) const {
    const auto index = (__m512i)(nibbles + shift);
    return {(Bytes)_mm512_maskz_permutexvar_epi8(~__mmask64{0}, index, low_),
            (Bytes)_mm512_maskz_permutexvar_epi8(~__mmask64{0}, index, high_)};
  }

 private:
  static constexpr ByteTable128 kLow = table_128([](int i) { return i < 31 ? integer_bits(i - 15) & 0xff : 0; });
  static constexpr ByteTable128 kHigh = table_128([](int i) { return i < 31 ? integer_bits(i - 15) >> 8 : 0; });

  const __m512i low_ = _mm512_load_si512(kLow.bytes), high_ = _mm512_load_si512(kHigh.bytes);
  alignas(64) uint32_t shifts_[kTileTokens];
  Bytes tokens_{};
};

template <typename Numbers>
class NibblePairs {
 public:
  static constexpr int64_t kChunkDims = 64;
  static constexpr int kSteps = 2;

  PC_FORCE_INLINE explicit NibblePairs(const StoredTile& tile) : numbers_(tile) {}
  PC_FORCE_INLINE void set_tokens(int t) { numbers_.set_tokens(t); }

  // The numbers with even index in step 0, the others in step 1.
  PC_FORCE_INLINE BytePair keys(Bytes codes, int k, int step) const {
    const Bytes nibbles = (step == 0 ? codes : (Bytes)((Words)codes >> 4)) & 15;
    return numbers_.bytes_of(nibbles, numbers_.of_quarters(k));
  }

  PC_FORCE_INLINE ValueCodes values(const StoredTile& tile, int t, int64_t d) const {
    static constexpr NibbleOrder kFirst = make_nibble_order(0), kSecond = make_nibble_order(16);
    const auto half = [&](const char* row) __attribute__((always_inline)) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d / 2));
    };
    const __m512i rows =
        _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(half(tile.codes[t])), half(tile.codes[t + 1]), 1);
    return {{words_of(rows, kFirst), words_of(rows, kSecond)}, numbers_.of_two(t)};
  }
  PC_FORCE_INLINE BytePair numbers_of(const ValueCodes& given, int half) const {
    const auto both = (BitVec)given.halves[half];
    return numbers_.bytes_of((Bytes)((both | both << 12) & 0x0f0f0f0f), given.shift);
  }

 private:
  PC_FORCE_INLINE static Bytes words_of(__m512i rows, const NibbleOrder& order) {
    constexpr __mmask64 kLowWords = 0x3333333333333333;
    return (Bytes)_mm512_maskz_permutexvar_epi8(kLowWords, _mm512_load_si512(order.bytes), rows);
  }

  Numbers numbers_;
};

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
