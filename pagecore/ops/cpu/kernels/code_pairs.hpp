// Codes of a quantised tile as pairs of bfloat16, in registers: four operands of 16 pairs for each 64 codes.
//
//   keys     a lane is a token, a dword of its codes; a pair is two numbers of the token (code_scores.hpp)
//   values   a pair is the numbers of two tokens at one dim; operand k holds the dims 16 k .. 16 k + 15
//
// Numbers of formats with scales of groups are not scaled here.
#pragma once

#include "pagecore/ops/cpu/kernels/dot.hpp"
#include "pagecore/ops/cpu/kernels/stored_tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512VBMI__)

// Dims of the operands that one step over values makes.
constexpr int64_t kValueDims = 64;

// The bytes 0 and 2 of the dwords of a, and 1 and 3 of b.
PC_FORCE_INLINE BitVec even_bytes(BitVec a, BitVec b) {
  const auto even = (__m512i)(BitVec{} + 0x00ff00ff);
  return (BitVec)_mm512_ternarylogic_epi32((__m512i)b, (__m512i)a, even, 0xd8);  // even ? a : b
}

// ---- codes of 8 bits

// Codes whose bytes of bfloat16 come from `Unpacker`.
template <typename Unpacker>
class BytePairs {
 public:
  static constexpr int kStepDwords = 2;

  PC_FORCE_INLINE explicit BytePairs(const StoredTile&) {}
  PC_FORCE_INLINE void set_tokens(int) {}

  // The numbers {0, 2} and {1, 3} of each dword.
  PC_FORCE_INLINE void keys(Vec dwords, PairVec* pairs) const {
    const BytePair numbers = unpacker_.bytes_of((Bytes)dwords);
    pairs[0] = (PairVec)even_bytes((BitVec)numbers.low, (BitVec)numbers.high << 8);
    pairs[1] = (PairVec)even_bytes((BitVec)numbers.low >> 8, (BitVec)numbers.high);
  }

  // The numbers of 64 dims from d on of the tokens t and t + 1.
  PC_FORCE_INLINE void values(const StoredTile& tile, int t, int64_t d, PairVec (&pairs)[4]) const {
    // Dword 4 k + i becomes dword k of part i, so that interleaving within parts gives the natural order.
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const auto codes = [&](const char* row) __attribute__((always_inline)) {
      return (Bytes)_mm512_maskz_permutexvar_epi32(kAllLanes, order, _mm512_loadu_si512(row + d));
    };
    const Bytes a = codes(tile.codes[t]), b = codes(tile.codes[t + 1]);
    const BytePair low = unpacker_.bytes_of((Bytes)zip_low(a, b)), high = unpacker_.bytes_of((Bytes)zip_high(a, b));
    pairs[0] = (PairVec)zip_low(low.low, low.high), pairs[1] = (PairVec)zip_high(low.low, low.high);
    pairs[2] = (PairVec)zip_low(high.low, high.high), pairs[3] = (PairVec)zip_high(high.low, high.high);
  }
  // Sums of products with the operands of values(), in the order of the dims.
  PC_FORCE_INLINE static void order(Vec (&)[4]) {}

 private:
  const Unpacker unpacker_{};
};

// ---- codes of 4 bits

// Order of 16 bytes of two rows: dword i has byte i of both in its words.
struct NibbleOrder {
  alignas(64) uint8_t bytes[64];
};

constexpr NibbleOrder make_nibble_order(int first) {
  NibbleOrder order{};
  for (int i = 0; i < 64; ++i) order.bytes[i] = static_cast<uint8_t>(first + i / 4 + i % 4 / 2 * 32);
  return order;
}

// (codes & 0x000f000f) | other
PC_FORCE_INLINE BitVec low_nibbles(BitVec codes, BitVec other) {
  return (BitVec)_mm512_ternarylogic_epi32((__m512i)codes, (__m512i)(BitVec{} + 0x000f000f), (__m512i)other, 0xea);
}

// The words of two tables of 32 by the low six bits of each index.
PC_FORCE_INLINE PairVec look_up_words(__m512i first, __m512i second, BitVec index) {
  return (PairVec)_mm512_maskz_permutex2var_epi16(~__mmask32{0}, first, (__m512i)index, second);
}

// e2m1, by tables of 16 numbers: keys without the scales of their groups, values times these.
class E2M1Codes {
 public:
  PC_FORCE_INLINE explicit E2M1Codes(const StoredTile& tile)
      : lookup_(tile.tables),
        scaled_(tile.numbers == tile.tables.e4m3_numbers ? tile.tables.e4m3 : tile.tables.ue8m0) {}
  PC_FORCE_INLINE void set_tokens(int) {}

  // The numbers i and i + 4 of each dword in vector i.
  PC_FORCE_INLINE void keys(BitVec dwords, PairVec* pairs) const {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) pairs[i] = (PairVec)lookup_.of_low_bits(dwords >> 4 * i);
  }

  // The numbers with even and with odd index of 32 dims from d on of the tokens t and t + 1: two groups.
  PC_FORCE_INLINE void values(const StoredTile& tile, int t, int64_t d, BitVec codes, PairVec* pairs) const {
    const BitVec table = {0x100000, 0x100000, 0x100000, 0x100000, 0x100000, 0x100000, 0x100000, 0x100000,
                          0x300020, 0x300020, 0x300020, 0x300020, 0x300020, 0x300020, 0x300020, 0x300020};
    const auto* a = reinterpret_cast<const uint8_t*>(tile.scales[t]) + d / 16;
    const auto* b = reinterpret_cast<const uint8_t*>(tile.scales[t + 1]) + d / 16;
    const __m512i first = join(scaled_[a[0]], scaled_[b[0]]), second = join(scaled_[a[1]], scaled_[b[1]]);
    pairs[0] = look_up_words(first, second, low_nibbles(codes, table));
    pairs[1] = look_up_words(first, second, low_nibbles(codes >> 4, table));
  }

 private:
  const E2M1Lookup lookup_;
  const CodeTable* const scaled_;
};

// int4, by a table of the numbers -15 .. 15. The index of a code is shifted by 15 minus the zero point of its token.
class Int4Codes {
 public:
  PC_FORCE_INLINE explicit Int4Codes(const StoredTile& tile)
      : lookup_(tile.tables), zero_points_(tile.tables.zero_points) {
    Vec scales[kTileDwords];
    if (!load_streams(tile.scale_addresses(), 0, scales)) {
      for (int t = 0; t < kTileTokens; ++t) __builtin_memcpy(&shifts_[t], tile.scales[t], 4);
      for (int i = 0; i < kTileDwords; ++i) scales[i] = (Vec) * reinterpret_cast<const BitVec*>(shifts_ + i * kLanes);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kTileDwords; ++i) {
      *reinterpret_cast<BitVec*>(shifts_ + i * kLanes) = 15 - ((BitVec)scales[i] & 15);
    }
  }
  PC_FORCE_INLINE void set_tokens(int t) { tokens_ = *reinterpret_cast<const BitVec*>(shifts_ + t) * 0x1010101; }

  // The numbers i and i + 4 of each dword in vector i.
  PC_FORCE_INLINE void keys(BitVec dwords, PairVec* pairs) const {
    const BitVec even = (dwords & 0x0f0f0f0f) + tokens_, odd = ((dwords >> 4) & 0x0f0f0f0f) + tokens_;
    pairs[0] = (PairVec)lookup_.of_low_bits(even);
    pairs[1] = (PairVec)lookup_.of_low_bits(odd);
    pairs[2] = (PairVec)lookup_.of_low_bits(even >> 8);
    pairs[3] = (PairVec)lookup_.of_low_bits(odd >> 8);
  }

  // The numbers with even and with odd index of 32 dims of the tokens t and t + 1.
  PC_FORCE_INLINE void values(const StoredTile&, int t, int64_t, BitVec codes, PairVec* pairs) const {
    const __m512i table = join(zero_points_[15 - shifts_[t]], zero_points_[15 - shifts_[t + 1]]);
    const BitVec second = BitVec{} + 0x100000;
    pairs[0] = (PairVec)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)low_nibbles(codes, second), table);
    pairs[1] = (PairVec)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)low_nibbles(codes >> 4, second), table);
  }

 private:
  const Int4Lookup lookup_;
  const CodeTable* const zero_points_;
  alignas(64) uint32_t shifts_[kTileTokens];
  BitVec tokens_{};
};

template <typename Numbers>
class NibblePairs {
 public:
  static constexpr int kStepDwords = 1;

  PC_FORCE_INLINE explicit NibblePairs(const StoredTile& tile) : numbers_(tile) {}
  PC_FORCE_INLINE void set_tokens(int t) { numbers_.set_tokens(t); }

  PC_FORCE_INLINE void keys(Vec dwords, PairVec* pairs) const { numbers_.keys((BitVec)dwords, pairs); }

  // The numbers of 64 dims from d on of the tokens t and t + 1: those with even index of the first 32 dims, the others
  // of these, and likewise for the last 32.
  PC_FORCE_INLINE void values(const StoredTile& tile, int t, int64_t d, PairVec (&pairs)[4]) const {
    static constexpr NibbleOrder kFirst = make_nibble_order(0), kSecond = make_nibble_order(16);
    const auto half = [&](const char* row) __attribute__((always_inline)) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d / 2));
    };
    const __m512i rows =
        _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(half(tile.codes[t])), half(tile.codes[t + 1]), 1);
    numbers_.values(tile, t, d, words_of(rows, kFirst), pairs);
    numbers_.values(tile, t, d + 32, words_of(rows, kSecond), pairs + 2);
  }
  // Sums of products with the operands of values(), in the order of the dims.
  PC_FORCE_INLINE static void order(Vec (&sums)[4]) {
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      const Vec even = sums[i], odd = sums[i + 1];
      sums[i] = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      sums[i + 1] = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
  }

 private:
  PC_FORCE_INLINE static BitVec words_of(__m512i rows, const NibbleOrder& order) {
    constexpr __mmask64 kLowBytes = 0x5555555555555555;
    return (BitVec)_mm512_maskz_permutexvar_epi8(kLowBytes, _mm512_load_si512(order.bytes), rows);
  }

  Numbers numbers_;
};

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
