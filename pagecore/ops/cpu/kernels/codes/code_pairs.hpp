// Codes of a quantised tile as pairs of bfloat16, in registers: an operand has 16 pairs.
//
//   keys     a pair is two numbers of a token; kVectors operands hold 32 kVectors dims
//   values   a pair is the numbers of two tokens at one dim; operand k holds the dims 16 k .. 16 k + 15
//
// The dims of a lane of all operands of keys are in one group. Numbers are not multiplied with the scales of groups
// here.
#pragma once

#include "pagecore/ops/cpu/kernels/codes/stored_tile.hpp"
#include "pagecore/ops/cpu/kernels/products/dot.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512BF16__)

// Operands that one step over values makes, and their dims.
constexpr int kValueVectors = 4;
constexpr int64_t kValueDims = kValueVectors * kLanes;

// ---- codes of 8 bits

// Codes whose bytes of bfloat16 come from `Unpacker`. With kGroups, a quarter of four operands of keys has the numbers
// of one group of 32.
template <typename Unpacker, bool kGroups = false>
class BytePairs {
 public:
  static constexpr bool kHasZeroPoints = false;

  PC_FORCE_INLINE explicit BytePairs(const StoredTile&) {}

  // Words of an operand of keys with consecutive dims.
  static constexpr int kKeyRun = 8;
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
      const auto* const from = reinterpret_cast<const float*>(row);
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
  // The part of sums of products with weights that is not of the numbers.
  PC_FORCE_INLINE float excess(const uint16_t*) const { return 0.0f; }

 private:
  const Unpacker unpacker_{};
};

// ---- codes of 4 bits

// A table of 16 numbers, twice.
PC_FORCE_INLINE __m512i twice(const CodeTable& table) {
  return _mm512_maskz_broadcast_i64x4(0xff, *reinterpret_cast<const __m256i*>(table.words));
}

// The words of a table that is there twice, by the low four bits of each index.
PC_FORCE_INLINE PairVec look_up_words(__m512i table, BitVec index) {
  return (PairVec)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, (__m512i)index, table);
}

// e2m1, without the scales of groups.
class E2M1Codes {
 public:
  static constexpr bool kHasZeroPoints = false;

  PC_FORCE_INLINE explicit E2M1Codes(const StoredTile& tile) : numbers_(twice(tile.tables.ue8m0[127])) {}

  PC_FORCE_INLINE __m512i table() const { return numbers_; }

  PC_FORCE_INLINE float excess(const uint16_t*) const { return 0.0f; }

 private:
  const __m512i numbers_;
};

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

  static constexpr int kKeyRun = 1;
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

  // The numbers of 64 dims from d on of the tokens t and t + 1.
  PC_FORCE_INLINE void values(const StoredTile& tile, int t, int64_t d, PairVec (&pairs)[4]) const {
    static constexpr ByteTable64 kBytes = nibble_bytes(), kShifts = nibble_shifts();
    const __m512i bytes = permute_rows(tile, t, d, kBytes);
    const auto first = (__m512i)_mm512_load_si512(kShifts.bytes);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const auto shifts = (__m512i)((Bytes)first + static_cast<uint8_t>(16 * n));
      pairs[n] =
          look_up_words(numbers_.table(), (BitVec)_mm512_maskz_multishift_epi64_epi8(~__mmask64{0}, shifts, bytes));
    }
  }
  // The same; operands 2 h and 2 h + 1 have the dims 32 h + 2 k and 32 h + 2 k + 1.
  PC_FORCE_INLINE void interleaved_values(const StoredTile& tile, int t, int64_t d, PairVec (&pairs)[4]) const {
    static constexpr ByteTable64 kBytes = table_64([](int i) { return i / 4 + i % 2 * 16 + i % 4 / 2 * 32; });
    const auto words = (BitVec)permute_rows(tile, t, d, kBytes);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) pairs[n] = look_up_words(numbers_.table(), words >> 4 * n);
  }
  PC_FORCE_INLINE float excess(const uint16_t* weights) const { return numbers_.excess(weights); }
  PC_FORCE_INLINE Vec zero_points(int t) const { return numbers_.zero_points(t); }

 private:
  // Bytes of the codes of 64 dims of the tokens t and t + 1: byte i of the token t + j is number i + 32 j of `order`.
  PC_FORCE_INLINE static __m512i permute_rows(const StoredTile& tile, int t, int64_t d, const ByteTable64& order) {
    const auto half = [&](const char* row) __attribute__((always_inline)) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d / 2));
    };
    const __m512i rows =
        _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(half(tile.codes[t])), half(tile.codes[t + 1]), 1);
    return _mm512_maskz_permutexvar_epi8(~__mmask64{0}, _mm512_load_si512(order.bytes), rows);
  }
  // Byte q + 8 n of both rows is in qword q, n pairs from its start.
  static constexpr ByteTable64 nibble_bytes() {
    return table_64([](int i) { return i / 8 + i % 8 / 2 * 8 + i % 2 * 32; });
  }
  // Bits from which on the words of a qword have the nibbles of its first pair.
  static constexpr ByteTable64 nibble_shifts() {
    return table_64([](int i) { return i % 4 / 2 * 8 + i % 8 / 4 * 4; });
  }

  Numbers numbers_;
};

// ---- queries

// Writes a chunk of `count` query rows as [kVectors, count, 32].
template <typename Codes, int kVectors>
inline void order_chunk(const uint16_t* rows, int64_t stride, int64_t count, uint16_t* to) {
  for (int v = 0; v < kVectors; ++v) {
    for (int64_t r = 0; r < count; ++r) {
      for (int i = 0; i < kPairLanes; i += Codes::kKeyRun, to += Codes::kKeyRun) {
        __builtin_memcpy(to, rows + r * stride + Codes::template key_dim<kVectors>(v, i), sizeof(*to) * Codes::kKeyRun);
      }
    }
  }
}

// Writes `count` query rows [count, dim] in the order of the operands of keys, [dim / 32, count, 32], in place. `given`
// is scratch for the rows.
template <typename Codes>
inline void order_queries(uint16_t* rows, int64_t dim, int64_t count, uint16_t* given) {
  __builtin_memcpy(given, rows, static_cast<size_t>(count * dim) * sizeof *rows);
  int64_t d = 0;
  for (; d + 4 * kPairLanes <= dim; d += 4 * kPairLanes, rows += 4 * kPairLanes * count) {
    order_chunk<Codes, 4>(given + d, dim, count, rows);
  }
  if (d < dim) order_chunk<Codes, 2>(given + d, dim, count, rows);
}

// The same for one row, by format.
inline void order_query(const Cache& cache, uint16_t* row, uint16_t* given) {
  if (row_bytes(cache) == cache.dim) return order_queries<BytePairs<Int8Unpacker>>(row, cache.dim, 1, given);
  order_queries<NibblePairs<Int4Codes>>(row, cache.dim, 1, given);
}

// The sum of the numbers of a query row.
PC_FORCE_INLINE float sum_query(const uint16_t* row, int64_t dim) {
  Vec lanes{};
  for (int64_t d = 0; d < dim; d += kPairLanes) lanes = dot(load_pairs(row + d), PairVec{} + 0x3f80, lanes);
  return sum(lanes);
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
