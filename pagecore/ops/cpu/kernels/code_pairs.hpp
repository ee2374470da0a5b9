// Codes of a quantised tile as pairs of bfloat16, in registers: an operand has 16 pairs.
//
//   keys     a pair is two numbers of a token; kVectors operands hold 32 kVectors dims (code_scores.hpp)
//   values   a pair is the numbers of two tokens at one dim; operand k holds the dims 16 k .. 16 k + 15
//
// The dims of a lane of all operands of keys are in one group. Keys are not multiplied with the scales of groups here.
#pragma once

#include "pagecore/ops/cpu/kernels/dot.hpp"
#include "pagecore/ops/cpu/kernels/stored_tile.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512VBMI__)

// Dims of the operands that one step over values makes.
constexpr int64_t kValueDims = 64;

// ---- codes of 8 bits

// Codes whose bytes of bfloat16 come from `Unpacker`. With kGroups, a quarter of four operands of keys has the numbers
// of one group of 32.
template <typename Unpacker, bool kGroups = false>
class BytePairs {
 public:
  static constexpr bool kHasZeroPoints = false;

  PC_FORCE_INLINE explicit BytePairs(const StoredTile&) {}

  // The dim of word `word` of operand `vector` of keys().
  template <int kVectors>
  PC_FORCE_INLINE static constexpr int key_dim(int vector, int word) {
    const int within = vector % 2 * 8 + word % 8, quarter = word / 8;
    return kGroups && kVectors == 4 ? quarter * 32 + vector / 2 * 16 + within : vector / 2 * 64 + quarter * 16 + within;
  }
  // Operands `vector` and `vector` + 1 of the token t from dim d on.
  template <int kVectors>
  PC_FORCE_INLINE void keys(const StoredTile& tile, int t, int64_t d, int vector, PairVec (&pairs)[2]) const {
    const char* const row = tile.codes[t] + d;
    Bytes codes;
    if constexpr (kGroups && kVectors == 4) {
      const auto* from = reinterpret_cast<const float*>(row);
      const Vec low = load(from), high = load(from + kLanes);
      codes = (Bytes)(vector == 0 ? even_quarters(low, high) : odd_quarters(low, high));
    } else {
      codes = (Bytes)_mm512_loadu_si512(row + 32 * vector);
    }
    const BytePair numbers = unpacker_.bytes_of(codes);
    pairs[0] = (PairVec)zip_low(numbers.low, numbers.high);
    pairs[1] = (PairVec)zip_high(numbers.low, numbers.high);
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
  // The part of these sums that is not of the numbers.
  PC_FORCE_INLINE float excess(const uint16_t*) const { return 0.0f; }

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

// A table of 16 numbers, twice.
PC_FORCE_INLINE __m512i twice(const CodeTable& table) {
  return _mm512_maskz_broadcast_i64x4(0xff, *reinterpret_cast<const __m256i*>(table.words));
}

// The words of a table that is there twice, by the low four bits of each index.
PC_FORCE_INLINE PairVec look_up_words(__m512i table, BitVec index) {
  return (PairVec)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)index, table);
}

// The words of two tables of 32 by the low six bits of each index.
PC_FORCE_INLINE PairVec look_up_words(__m512i first, __m512i second, BitVec index) {
  return (PairVec)_mm512_maskz_permutex2var_epi16(~__mmask32{0}, first, (__m512i)index, second);
}

// e2m1, by tables of 16 numbers: keys without the scales of their groups, values times these.
class E2M1Codes {
 public:
  static constexpr bool kHasZeroPoints = false;

  PC_FORCE_INLINE explicit E2M1Codes(const StoredTile& tile)
      : numbers_(twice(tile.tables.ue8m0[127])),
        scaled_(tile.numbers == tile.tables.e4m3_numbers ? tile.tables.e4m3 : tile.tables.ue8m0) {}

  PC_FORCE_INLINE __m512i table() const { return numbers_; }

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
  PC_FORCE_INLINE float excess(const uint16_t*) const { return 0.0f; }

 private:
  const __m512i numbers_;
  const CodeTable* const scaled_;
};

// The zero points of a tile of int4.
PC_FORCE_INLINE void load_zero_points(const StoredTile& tile, Vec (&points)[kTileDwords]) {
  load_dword_rows(tile.scale_addresses(), 0, points);
#pragma GCC unroll 4
  for (int i = 0; i < kTileDwords; ++i) points[i] = __builtin_convertvector((IntVec)points[i] & 15, Vec);
}

// int4, as codes. The products with the zero points are subtracted from sums: keys have one a token, which multiplies
// the sum of a query row, and values one for all dims.
class Int4Codes {
 public:
  static constexpr bool kHasZeroPoints = true;

  PC_FORCE_INLINE explicit Int4Codes(const StoredTile& tile) : codes_(twice(tile.tables.zero_points[0])) {
    load_zero_points(tile, points_);
  }

  PC_FORCE_INLINE __m512i table() const { return codes_; }
  // Those of 16 tokens from t on.
  PC_FORCE_INLINE Vec zero_points(int t) const { return points_[t / kLanes]; }

  // The codes with even and with odd index of 32 dims of the tokens t and t + 1.
  PC_FORCE_INLINE void values(const StoredTile&, int, int64_t, BitVec codes, PairVec* pairs) const {
    pairs[0] = look_up_words(codes_, codes);
    pairs[1] = look_up_words(codes_, codes >> 4);
  }
  // The sum of weights times zero points.
  PC_FORCE_INLINE float excess(const uint16_t* weights) const {
    Vec sums{};
#pragma GCC unroll 4
    for (int t = 0; t < kTileTokens; t += kLanes) {
      sums = fma(widen_bf16(load_half(weights + t)), points_[t / kLanes], sums);
    }
    return sum(sums);
  }

 private:
  const __m512i codes_;
  Vec points_[kTileDwords];
};

template <typename Numbers>
class NibblePairs {
 public:
  static constexpr bool kHasZeroPoints = Numbers::kHasZeroPoints;

  PC_FORCE_INLINE explicit NibblePairs(const StoredTile& tile) : numbers_(tile) {}

  // The dim of word `word` of operand `vector` of keys().
  template <int kVectors>
  PC_FORCE_INLINE static constexpr int key_dim(int vector, int word) {
    return kVectors == 4 ? word / 2 * 8 + word % 2 * 4 + vector : 2 * word + vector;
  }
  // Operands `vector` and `vector` + 1 of the token t from dim d on. The other nibbles of a word are shifted out of its
  // index, or do not count in it.
  template <int kVectors>
  PC_FORCE_INLINE void keys(const StoredTile& tile, int t, int64_t d, int vector, PairVec (&pairs)[2]) const {
    const char* const row = tile.codes[t] + d / 2;
    const __m512i table = numbers_.table();
    BitVec codes;
    if constexpr (kVectors == 4) {
      codes = (BitVec)_mm512_loadu_si512(row);
    } else {
      const auto half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
      codes = (BitVec)_mm512_maskz_cvtepu8_epi16(~__mmask32{0}, half);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) pairs[i] = look_up_words(table, codes >> 4 * (vector + i));
  }

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
  PC_FORCE_INLINE float excess(const uint16_t* weights) const { return numbers_.excess(weights); }
  PC_FORCE_INLINE Vec zero_points(int t) const { return numbers_.zero_points(t); }

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
