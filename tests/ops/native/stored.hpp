// Keys or values of a cache in any format, with guards around codes and scales, and the numbers that they represent.
#pragma once

#include <memory>

#include "tests/ops/native/floats.hpp"

namespace pagecore::test {

constexpr std::initializer_list<Format> kFormats = {Format::E4M3,    Format::E5M2,    Format::E4M3Token,
                                                    Format::I8Token, Format::I4Token, Format::FP4Block16,
                                                    Format::NVFP4,   Format::MXFP8};

inline double float8_number(int code, int mantissa_bits, int bias) {
  const int magnitude = code & 0x7f, exponent = magnitude >> mantissa_bits, one = 1 << mantissa_bits;
  const int mantissa = magnitude & (one - 1);
  const double size = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                    : std::ldexp(one + mantissa, exponent - bias - mantissa_bits);
  return code < 128 ? size : -size;
}

// Slots that fill() has not filled hold codes of 0xff and scales of 0xff: NaN wherever a format has NaN.
class Stored {
 public:
  Stored(Random& random, Format format, Float type, int64_t blocks, int64_t block_size, int64_t heads, int64_t dim)
      : type_(format == Format::Plain ? type : code_type(format)) {
    cache_.format = format;
    cache_.type = type_;
    cache_.dim = dim;
    const int64_t size = format == Format::Plain ? size_of(type) : 1, per_byte = is_packed() ? 2 : 1;
    codes_ = std::make_unique<Array>(random, std::vector{blocks, block_size, heads, dim / per_byte}, size);
    codes_->fill_bytes(-1);
    if (scale_bytes(cache_) == 0) return;
    const int64_t item = is_token() ? 4 : 1;
    scales_ = std::make_unique<Array>(random, std::vector{blocks, block_size, heads, scale_bytes(cache_) / item}, item);
    scales_->fill_bytes(-1);
  }

  // True if rows of `dim` numbers can be stored.
  static bool stores(Format format, int64_t dim) {
    switch (format) {
      case Format::MXFP8: return dim % 32 == 0;
      case Format::NVFP4:
      case Format::FP4Block16: return dim % 16 == 0;
      case Format::I4Token: return dim % 2 == 0;
      default: return true;
    }
  }

  [[nodiscard]] const Array& codes() const { return *codes_; }
  [[nodiscard]] bool is_plain() const { return cache_.format == Format::Plain; }
  // The type that kernels compute with.
  [[nodiscard]] Float number_type() const { return is_plain() ? type_ : Float::BF16; }
  void check_guards() const {
    codes_->memory().check();
    if (scales_) scales_->memory().check();
  }

  [[nodiscard]] Cache cache() const {
    Cache cache = as_cache(*codes_, type_);
    cache.dim = cache_.dim;
    cache.format = cache_.format;
    if (scales_) cache.scales = {scales_->data(), scales_->stride(0), scales_->stride(1), scales_->stride(2)};
    return cache;
  }

  // Fills a slot with random numbers that are mostly below 8.
  void fill(Random& random, int64_t block, int64_t within) {
    for (int64_t head = 0; head < codes_->shape(2); ++head) {
      char* row = codes_->at({block, within, head, 0});
      for (int64_t i = 0; i < codes_->shape(3); ++i) {
        if (is_plain()) {
          narrow(type_, random.normal(), row + i * size_of(type_));
        } else {
          row[i] = static_cast<char>(random_code(random));
        }
      }
      if (scales_) fill_scales(random, scales_->at({block, within, head, 0}));
    }
  }

  [[nodiscard]] double number(int64_t block, int64_t within, int64_t head, int64_t d) const {
    const char* row = codes_->at({block, within, head, 0});
    const char* scale = scales_ ? scales_->at({block, within, head, 0}) : nullptr;
    const auto byte = [](const char* p, int64_t i) { return static_cast<int>(static_cast<uint8_t>(p[i])); };
    const auto nibble = [&] { return byte(row, d / 2) >> (d % 2 * 4) & 15; };
    switch (cache_.format) {
      case Format::E4M3: return float8_number(byte(row, d), 3, 7);
      case Format::E5M2: return float8_number(byte(row, d), 2, 15);
      case Format::E4M3Token: return float8_number(byte(row, d), 3, 7) * token_scale(scale, 0);
      case Format::I8Token: return static_cast<int8_t>(row[d]) * token_scale(scale, 0);
      case Format::I4Token: return (nibble() - (byte(scale, 0) & 15)) * token_scale(scale, 15);
      case Format::FP4Block16: return e2m1_number(nibble()) * std::ldexp(1.0, byte(scale, d / 16) - 127);
      case Format::NVFP4: return e2m1_number(nibble()) * float8_number(byte(scale, d / 16), 3, 7);
      case Format::MXFP8: return float8_number(byte(row, d), 3, 7) * std::ldexp(1.0, byte(scale, d / 32) - 127);
      default: return widen(type_, row + d * size_of(type_));
    }
  }

 private:
  static Float code_type(Format format) {
    switch (format) {
      case Format::E5M2: return Float::F8E5M2;
      case Format::E4M3:
      case Format::E4M3Token:
      case Format::MXFP8: return Float::F8E4M3FN;
      case Format::I8Token: return Float::I8;
      default: return Float::U8;
    }
  }
  [[nodiscard]] bool is_packed() const {
    return cache_.format == Format::I4Token || cache_.format == Format::FP4Block16 || cache_.format == Format::NVFP4;
  }
  [[nodiscard]] bool is_token() const {
    return cache_.format == Format::E4M3Token || cache_.format == Format::I8Token || cache_.format == Format::I4Token;
  }
  static double e2m1_number(int code) {
    constexpr double kMagnitudes[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
    return code < 8 ? kMagnitudes[code] : -kMagnitudes[code - 8];
  }
  static double token_scale(const char* scale, uint32_t cleared) {
    uint32_t bits;
    std::memcpy(&bits, scale, sizeof bits);
    bits &= ~cleared;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }

  int64_t random_code(Random& random) const {
    const int64_t code = random.below(256);
    switch (cache_.format) {
      case Format::E4M3:
      case Format::E4M3Token:
      case Format::MXFP8: return (code & 0x80) | (code & 0x7f) % 0x48;
      case Format::E5M2: return (code & 0x80) | (code & 0x7f) % 0x44;
      default: return code;
    }
  }
  void fill_scales(Random& random, char* scales) const {
    if (is_token()) {
      const double most = cache_.format == Format::I8Token ? 0.03 : cache_.format == Format::I4Token ? 0.3 : 2.0;
      const auto scale = static_cast<float>(most * (0.1 + random.unit()));
      uint32_t bits;
      std::memcpy(&bits, &scale, sizeof bits);
      if (cache_.format == Format::I4Token) bits = (bits & ~15u) | static_cast<uint32_t>(random.below(16));
      std::memcpy(scales, &bits, sizeof bits);
      return;
    }
    for (int64_t i = 0; i < scale_bytes(cache_); ++i) {
      scales[i] = static_cast<char>(cache_.format == Format::NVFP4 ? random.below(0x3c) : random.between(120, 127));
    }
  }

  Float type_;
  Cache cache_;  // format, type and dim alone
  std::unique_ptr<Array> codes_, scales_;
};

}  // namespace pagecore::test
