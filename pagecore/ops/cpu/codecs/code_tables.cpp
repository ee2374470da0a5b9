#include "pagecore/ops/cpu/code_tables.hpp"

#include <limits>

namespace pagecore::cpu {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

constexpr double power_of_two(int exponent) {
  double power = 1.0;
  for (int i = 0; i < exponent; ++i) power *= 2.0;
  for (int i = 0; i > exponent; --i) power *= 0.5;
  return power;
}

// Bits of a number that bfloat16 represents exactly; infinity if it exceeds the range.
constexpr uint16_t bf16_bits(double value) {
  constexpr double kSmallestNormal = power_of_two(-126), kLimit = power_of_two(128);
  if (value != value) return 0x7fc0;
  const uint64_t sign = __builtin_bit_cast(uint64_t, value) >> 63 << 15;
  const double magnitude = value < 0.0 ? -value : value;
  uint64_t bits = 0x7f80;
  if (magnitude < kSmallestNormal) {
    bits = static_cast<uint64_t>(magnitude * power_of_two(133));
  } else if (magnitude < kLimit) {
    bits = __builtin_bit_cast(uint32_t, static_cast<float>(magnitude)) >> 16;
  }
  return static_cast<uint16_t>(sign | bits);
}

constexpr double e2m1(int code) {
  constexpr double kMagnitudes[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  return code < 8 ? kMagnitudes[code] : -kMagnitudes[code - 8];
}

constexpr double ue8m0(int byte) { return byte == 255 ? kNan : power_of_two(byte - 127); }

constexpr double e4m3(int byte) {
  const int magnitude = byte & 0x7f, exponent = magnitude >> 3, mantissa = magnitude & 7;
  if (magnitude == 0x7f) return kNan;
  const double value = exponent == 0 ? mantissa * power_of_two(-9) : (8 + mantissa) * power_of_two(exponent - 10);
  return byte < 128 ? value : -value;
}

constexpr void set(CodeTable& table, int code, double value) {
  const uint16_t bits = bf16_bits(value);
  table.words[code] = bits;
  table.low[code] = static_cast<uint8_t>(bits & 0xff);
  table.high[code] = static_cast<uint8_t>(bits >> 8);
}

constexpr CodeTables make_tables() {
  CodeTables tables{};
  for (int i = 0; i < 32; ++i) tables.integers[i] = bf16_bits(i - 15);
  for (int i = 0; i < 256; ++i) {
    tables.ue8m0_numbers[i] = static_cast<float>(ue8m0(i));
    tables.e4m3_numbers[i] = static_cast<float>(e4m3(i));
  }
  for (int code = 0; code < 16; ++code) {
    for (int scale = 0; scale < 256; ++scale) {
      set(tables.ue8m0[scale], code, e2m1(code) * ue8m0(scale));
      set(tables.e4m3[scale], code, e2m1(code) * e4m3(scale));
    }
    for (int zero_point = 0; zero_point < 16; ++zero_point)
      set(tables.zero_points[zero_point], code, code - zero_point);
  }
  return tables;
}

}  // namespace

constexpr CodeTables kCodeTables = make_tables();

}  // namespace pagecore::cpu
