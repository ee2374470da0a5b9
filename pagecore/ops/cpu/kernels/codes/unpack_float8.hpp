// e4m3 and e5m2 as bfloat16, 8 bits to 16, by lookups of both bytes of a number.
//
//   code   s | high index | low bits
//   number s | high[code >> kHigh] | low[code & 15]     normal
//          s | small_high[code & 15] | small_low[...]   high index 0: subnormal or of the least exponents
//          s | 0x7f | special_low[code & 15]            infinity or NaN
#pragma once

#include "pagecore/ops/cpu/kernels/simd/bytes.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

struct E4M3Code {
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr int kSpecial = 0x7f;  // magnitudes from here on are infinite or NaN
  static constexpr int kInfinity = 0x80;
};

struct E5M2Code {
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr int kSpecial = 0x7c;
  static constexpr int kInfinity = 0x7c;
};

struct Float8Tables {
  uint8_t high[16] = {};
  uint8_t low[16] = {};
  uint8_t small_high[16] = {};
  uint8_t small_low[16] = {};
  uint8_t special_low[16] = {};
};

// Bits of a magnitude below kSpecial, as bfloat16.
template <typename Code>
constexpr int bits_of_magnitude(int magnitude) {
  constexpr int kMantissaOfBf16 = 7, kBiasOfBf16 = 127;
  int exponent = magnitude >> Code::kMantissaBits, mantissa = magnitude & ((1 << Code::kMantissaBits) - 1);
  if (exponent == 0) {
    if (mantissa == 0) return 0;
    for (exponent = 1; mantissa >> Code::kMantissaBits == 0; --exponent) mantissa *= 2;
    mantissa -= 1 << Code::kMantissaBits;
  }
  return ((exponent - Code::kBias + kBiasOfBf16) << kMantissaOfBf16) |
         (mantissa << (kMantissaOfBf16 - Code::kMantissaBits));
}

// Bits of any magnitude, as bfloat16.
template <typename Code>
constexpr int float8_bits(int magnitude) {
  if (magnitude < Code::kSpecial) return bits_of_magnitude<Code>(magnitude);
  return magnitude == Code::kInfinity ? 0x7f80 : 0x7fff;
}

template <typename Code>
constexpr Float8Tables make_float8_tables() {
  constexpr int kHigh = Code::kMantissaBits + 1;
  Float8Tables tables;
  for (int i = 0; i < 16; ++i) {
    if (i << kHigh < 0x80)
      tables.high[i] = static_cast<uint8_t>(bits_of_magnitude<Code>((i == 0 ? 1 : i) << kHigh) >> 8);
    tables.low[i] = static_cast<uint8_t>(bits_of_magnitude<Code>((1 << kHigh) | (i & ((1 << kHigh) - 1))));
    tables.small_high[i] = static_cast<uint8_t>(bits_of_magnitude<Code>(i) >> 8);
    tables.small_low[i] = static_cast<uint8_t>(bits_of_magnitude<Code>(i));
    tables.special_low[i] = 0xff;
  }
  if (Code::kInfinity < 0x80) tables.special_low[Code::kInfinity & 15] = 0x80;
  return tables;
}

#if defined(__AVX512VBMI__)

// One lookup in 128 magnitudes for each byte of a number.
template <typename Code>
class Float8Unpacker {
 public:
  // Calls put(first, words) for two vectors of bfloat16, the numbers of a vector of codes.
  template <typename Put>
  PC_FORCE_INLINE void unpack(Bytes codes, Put&& put) const {
    put_words(bytes_of(spread(codes)), put);
  }
  PC_FORCE_INLINE BytePair bytes_of(Bytes codes) const {
    return {look_up_128(low_, codes), with_sign(look_up_128(high_, codes), codes)};
  }

 private:
  static constexpr ByteTable128 kLow = table_128([](int code) { return float8_bits<Code>(code) & 0xff; });
  static constexpr ByteTable128 kHigh = table_128([](int code) { return float8_bits<Code>(code) >> 8; });

  const WideTable low_{kLow}, high_{kHigh};
};

#else

template <typename Code>
class Float8Unpacker {
 public:
  // Calls put(first, words) for two vectors of bfloat16, the numbers of a vector of codes.
  template <typename Put>
  PC_FORCE_INLINE void unpack(Bytes given, Put&& put) const {
    const Bytes codes = spread(given), nibble = codes & 15, magnitude = codes & 0x7f;
    const auto is_small = magnitude < kUsual;
    const auto is_special = magnitude >= kSpecial;
    const Bytes usual_high = look_up(high_, (Bytes)((Words)magnitude >> kHigh) & 15);
    Bytes high = is_small ? look_up(small_high_, nibble) : usual_high;
    Bytes low = is_small ? look_up(small_low_, nibble) : look_up(low_, nibble);
    high = is_special ? magnitude | 0x7f : high;
    low = is_special ? look_up(special_low_, nibble) : low;
    high |= codes & 0x80;
    put_words({low, high}, put);
  }

 private:
  static constexpr int kHigh = Code::kMantissaBits + 1;
  static constexpr uint8_t kUsual = 1 << kHigh, kSpecial = Code::kSpecial;
  static constexpr Float8Tables kTables = make_float8_tables<Code>();

  const Bytes high_ = repeat(kTables.high), low_ = repeat(kTables.low), small_high_ = repeat(kTables.small_high),
              small_low_ = repeat(kTables.small_low), special_low_ = repeat(kTables.special_low);
};

#endif

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
