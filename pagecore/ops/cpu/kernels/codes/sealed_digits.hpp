// Exact products of the codes of sealed blocks with numbers that are rounded to two digits of int8: high * 256 + low.
//
// The largest magnitude of the numbers that share a factor becomes 32639: the error is at most 1.6e-5 of it.
//
//   digits   [numbers / 32, R]   low digits of 32 numbers of a row, then their high digits
//   codes    bytes               a lane has those of four numbers, whose products are added
#pragma once

#include "pagecore/ops/cpu/kernels/codes/integer_codes.hpp"
#include "pagecore/ops/cpu/kernels/simd/transpose.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX2__)

// Numbers whose digits are stored together, and bytes of these digits.
constexpr int kPanel = 32, kPanelBytes = 2 * kPanel;
constexpr int kMostCode = 15;
// Rows of the largest blocks whose sums have registers.
constexpr int kSealedRows = kLanes == 16 ? 4 : 2;

// ---- digits

// 128 more than the nearest integers of numbers times `factor`, whose low digit is then unsigned, in the low 16 bits.
PC_FORCE_INLINE BitVec shifted_integers(const float* numbers, Vec factor) {
  return (BitVec)fma(load(numbers), factor, splat(0x1.8p23f + 128.0f));
}

// Writes the digits of 32 numbers times `factor`.
PC_FORCE_INLINE void write_panel(const float* numbers, Vec factor, int8_t* to) {
#if defined(__AVX512VBMI__)
  static constexpr auto kOrder =
      table_64([](int i) { return i < kPanel ? 4 * i : 4 * (i - kPanel) + 1; });  // bytes 0, then bytes 1
  const auto first = (__m512i)shifted_integers(numbers, factor);
  const auto second = (__m512i)shifted_integers(numbers + kLanes, factor);
  const __m512i signs = _mm512_maskz_set1_epi8(~__mmask64{0} >> kPanel, -128);
  const __m512i digits = _mm512_permutex2var_epi8(first, _mm512_load_si512(kOrder.bytes), second);
  _mm512_storeu_si512(to, digits ^ signs);
#elif defined(__AVX512F__)
#pragma GCC unroll 2
  for (int i = 0; i < kPanel; i += kLanes) {
    const auto integers = (__m512i)shifted_integers(numbers + i, factor);
    const __m128i low = _mm512_maskz_cvtepi32_epi8(kAllLanes, integers);
    const __m128i high = _mm512_maskz_cvtepi32_epi8(kAllLanes, (__m512i)((BitVec)integers >> 8));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_xor_si128(low, _mm_set1_epi8(-128)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kPanel + i), high);
  }
#else
  const auto words = [&](int i) __attribute__((always_inline)) {  // of two vectors, in turn in each half
    const auto low = (__m256i)(shifted_integers(numbers + i, factor) & 0xffff);
    const auto high = (__m256i)(shifted_integers(numbers + i + kLanes, factor) & 0xffff);
    return (Words)_mm256_packus_epi32(low, high);
  };
  const Words first = words(0), second = words(2 * kLanes);
  const auto store_bytes = [](int8_t* at, Words a, Words b) __attribute__((always_inline)) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7),
                  bytes = _mm256_packus_epi16((__m256i)a, (__m256i)b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm256_permutevar8x32_epi32(bytes, order));
  };
  store_bytes(to, (first & 255) ^ 128, (second & 255) ^ 128);
  store_bytes(to + kPanel, first >> 8, second >> 8);
#endif
}

typedef int32_t IntVec4 __attribute__((vector_size(16)));

// The maxima of the lanes of four vectors.
PC_FORCE_INLINE IntVec4 max_each(IntVec a, IntVec b, IntVec c, IntVec d) {
  const auto join = [](IntVec x, IntVec y) __attribute__((always_inline)) {
    return max((IntVec)zip_low((Vec)x, (Vec)y), (IntVec)zip_high((Vec)x, (Vec)y));
  };
  const IntVec quarters = join(join(a, c), join(b, d));
  IntVec4 most{};
  for_each_constant<kLanes / 4>([&]<int I>() __attribute__((always_inline)) {
    const IntVec4 quarter = __builtin_shufflevector(quarters, quarters, 4 * I, 4 * I + 1, 4 * I + 2, 4 * I + 3);
    most = most > quarter ? most : quarter;
  });
  return most;
}

// The vector of row r; past the last row, that of the last.
template <int R, typename V>
PC_FORCE_INLINE V row_of(const V (&rows)[R], int r) {
  return rows[r < R ? r : R - 1];
}

// The factors that make rows integers up to kLargestDigits, from the bits of their largest magnitudes, and their
// inverse: both 0 for rows of zeros. Returns false for infinities and NaN, whose bits are the largest, and rows that
// are too small.
template <int R>
PC_FORCE_INLINE bool digit_factors(const IntVec (&largest)[R], Vec4& factors, Vec4& units) {
  const IntVec4 bits = max_each(row_of(largest, 0), row_of(largest, 1), row_of(largest, 2), row_of(largest, 3));
  const auto numbers = (Vec4)bits;
  const IntVec4 zero = bits == 0, invalid = (bits >= kInfinityBits) | ((numbers < kLeastScale) & ~zero);
  factors = (Vec4)((IntVec4)(kLargestDigits / numbers) & ~zero);
  units = numbers * (1 / kLargestDigits);
  return _mm_testz_si128((__m128i)invalid, (__m128i)invalid) != 0;
}

template <int R>
PC_FORCE_INLINE Vec4 sum_each(const Vec (&rows)[R]) {
  return sum_each(row_of(rows, 0), row_of(rows, 1), row_of(rows, 2), row_of(rows, 3));
}

// Numbers of R rows that become digits: [panels, R, 32].
template <int R>
struct DigitRows {
  IntVec largest[R] = {};  // magnitudes

  PC_FORCE_INLINE void put(float* numbers, int r, Vec of_row) {
    largest[r] = max(largest[r], (IntVec)of_row & kMagnitudeBits);
    store(numbers + r * kPanel, of_row);
  }
  // Writes the digits. Returns false if a row cannot be written so.
  PC_FORCE_INLINE bool write(const float* numbers, const int64_t panels, int8_t* digits, float (&units)[R]) const {
    Vec4 factors, inverse;
    if (!digit_factors(largest, factors, inverse)) return false;
#pragma GCC unroll 2
    for (int64_t i = 0; i < panels; ++i, numbers += R * kPanel, digits += R * kPanelBytes) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) write_panel(numbers + r * kPanel, splat(factors[r]), digits + r * kPanelBytes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) units[r] = inverse[r];
    return true;
  }
};

// ---- sums

// Four bytes in all lanes.
PC_FORCE_INLINE Bytes repeat_dword(const int8_t* p) {
  typedef int32_t Dword __attribute__((may_alias, aligned(1)));
  return (Bytes)(IntVec{} + *reinterpret_cast<const Dword*>(p));
}

// Sums of products with codes, in each lane. 16 bits hold the sum of a panel, of which a lane has every second number.
static_assert(kPanel / 2 * kMostCode * 128 <= INT16_MAX);
class DigitSum {
 public:
#if defined(__AVX512VNNI__)
  PC_FORCE_INLINE void add(Bytes codes, Bytes low, Bytes high) {
    low_ = (IntVec)_mm512_dpbusd_epi32((__m512i)low_, (__m512i)codes, (__m512i)low);
    high_ = (IntVec)_mm512_dpbusd_epi32((__m512i)high_, (__m512i)codes, (__m512i)high);
  }
  PC_FORCE_INLINE void end_panel() {}
  [[nodiscard]] PC_FORCE_INLINE Vec total() const { return to_floats((high_ << 8) + low_); }

 private:
  IntVec low_{}, high_{};
#else
  PC_FORCE_INLINE void add(Bytes codes, Bytes low, Bytes high) {
    low_ += multiply_bytes(codes, low);
    high_ += multiply_bytes(codes, high);
  }
  PC_FORCE_INLINE void end_panel() {
    sum_ += multiply_pairs(low_, Shorts{} + 1) + multiply_pairs(high_, Shorts{} + 256);
    low_ = high_ = Shorts{};
  }
  [[nodiscard]] PC_FORCE_INLINE Vec total() const { return to_floats(sum_); }

 private:
  PC_FORCE_INLINE static Shorts multiply_bytes(Bytes codes, Bytes digits) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_maskz_maddubs_epi16(~__mmask32{0}, (__m512i)codes, (__m512i)digits);
#else
    return (Shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)digits);
#endif
  }

  Shorts low_{}, high_{};
  IntVec sum_{};
#endif
};

// Shifts of lanes that have a nibble each: the low and the high one in turn.
PC_FORCE_INLINE BitVec nibble_shifts() {
  BitVec shifts;
  for (int lane = 0; lane < kLanes; ++lane) shifts[lane] = lane % 2 * 4u;
  return shifts;
}

// Splits bytes into the two codes of each, which are in their low four bits (2-bit codes) or in all eight (4-bit
// codes).
template <int kBits>
PC_FORCE_INLINE void split_codes(Bytes both, Bytes (&codes)[2]) {
  constexpr uint8_t kMask = (1 << kBits) - 1;
  codes[0] = both & kMask;
  codes[1] = (Bytes)((Words)both >> kBits) & kMask;
}

// Adds the products of bytes of codes with the digits of 32 numbers of R rows. `bytes_of(i)` returns those of the
// numbers 4 i .. 4 i + 3.
template <int kBits, int R, typename BytesOf>
PC_FORCE_INLINE void add_panel_products(const int8_t* digits, BytesOf&& bytes_of, DigitSum (&sums)[R][2]) {
#pragma GCC unroll 4
  for (int i = 0; i < kPanel / 4; ++i) {
    Bytes codes[2];
    split_codes<kBits>(bytes_of(i), codes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int8_t* const of_row = digits + r * kPanelBytes + 4 * i;
      const Bytes low = repeat_dword(of_row), high = repeat_dword(of_row + kPanel);
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) sums[r][k].add(codes[k], low, high);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) sums[r][k].end_panel();
  }
}

template <int kFrom, int... I>
PC_FORCE_INLINE Vec interleave(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (kFrom + I / 2 + I % 2 * kLanes)...);
}
// The lanes of both vectors in turn: a0 b0 a1 b1 ..
PC_FORCE_INLINE void interleave(Vec& a, Vec& b) {
  const Vec low = interleave<0>(a, b, Lanes{}), high = interleave<kLanes / 2>(a, b, Lanes{});
  a = low, b = high;
}

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
