// AMX emulated in memory, as specified in Intel's manual. Where the hardware would fault, the emulation prints the
// violated rule and aborts.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "pagecore/ops/cpu/kernels/simd/amx.hpp"
#include "pagecore/ops/cpu/kernels/simd/vec.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

struct AmxState {
  AmxConfig config;  // palette 0: not configured
  alignas(64) uint8_t bytes[8][kAmxRows][kAmxRowBytes] = {};
};

thread_local AmxState amx_state;

class EmulatedAmx {
 public:
  static void configure(const AmxConfig& config) {
    amx_state = {};
    if (config.palette == 0) return;
    expects(config.palette == 1, "the palette must be 0 or 1");
    for (const uint8_t each : config.reserved) expects(each == 0, "reserved bytes of a configuration must be 0");
    expects(config.start_row == 0, "start_row must be 0; only an interrupted instruction resumes after row 0");
    for (int tile = 0; tile < 16; ++tile) {
      const int rows = config.rows[tile], row_bytes = config.row_bytes[tile];
      expects(tile < 8 || (rows == 0 && row_bytes == 0), "palette 1 has only eight tiles");
      expects(rows <= kAmxRows && row_bytes <= kAmxRowBytes, "a tile has at most 16 rows of 64 bytes");
      expects((rows == 0) == (row_bytes == 0), "a tile must have rows and columns, or neither");
    }
    amx_state.config = config;
  }
  static void release() { amx_state = {}; }
  template <int T>
  static void zero() {
    shape_of(T);
    __builtin_memset(amx_state.bytes[T], 0, sizeof(amx_state.bytes[T]));
  }
  template <int T>
  static void load(const void* from, int64_t stride) {
    const Shape shape = shape_of(T);
    zero<T>();
    for (int row = 0; row < shape.rows; ++row) {
      __builtin_memcpy(amx_state.bytes[T][row], static_cast<const char*>(from) + row * stride, shape.row_bytes);
    }
  }
  template <int T>
  static void load_once(const void* from, int64_t stride) {
    load<T>(from, stride);
  }
  template <int T>
  static void store(void* to, int64_t stride) {
    const Shape shape = shape_of(T);
    for (int row = 0; row < shape.rows; ++row) {
      __builtin_memcpy(static_cast<char*>(to) + row * stride, amx_state.bytes[T][row], shape.row_bytes);
    }
  }
  // Even and odd products are summed separately; then both sums are added to the old value.
  template <int kSum, int kLeft, int kRight>
  static void multiply() {
    const Shape sum = shape_of_product<kSum, kLeft, kRight>(), right = shape_of(kRight);
    for (int m = 0; m < sum.rows; ++m) {
      Vec even = {}, odd = {};
      for (int k = 0; k < right.rows; ++k) {
        uint32_t pair;
        __builtin_memcpy(&pair, amx_state.bytes[kLeft][m] + 4 * k, sizeof(pair));
        const auto pairs = (BitVec)load_row(kRight, k);
        even = without_denormals(fma(low(BitVec{} + pair), low(pairs), even));
        odd = without_denormals(fma(high(BitVec{} + pair), high(pairs), odd));
      }
      const Vec was = without_denormals(load_row(kSum, m));
      store_row(kSum, m, without_denormals(was + without_denormals(even + odd)));
    }
    clear_rows(kSum, sum.rows);
  }
  // Sums wrap.
  template <int kSum, int kLeft, int kRight>
  static void multiply_bytes() {
    const Shape sum = shape_of_product<kSum, kLeft, kRight>(), right = shape_of(kRight);
    for (int m = 0; m < sum.rows; ++m) {
      auto sums = (BitVec)load_row(kSum, m);
      for (int k = 0; k < right.rows; ++k) {
        const auto codes = (IntVec)load_row(kRight, k);
        for (int i = 0; i < 4; ++i) {
          const auto number = static_cast<int8_t>(amx_state.bytes[kLeft][m][4 * k + i]);
          sums += (BitVec)((codes << (24 - 8 * i) >> 24) * number);
        }
      }
      store_row(kSum, m, (Vec)sums);
    }
    clear_rows(kSum, sum.rows);
  }

 private:
  struct Shape {
    int rows;
    int row_bytes;
  };

  static void expects(bool condition, const char* rule) {
    if (condition) return;
    std::fprintf(stderr, "emulated AMX: %s\n", rule);
    std::abort();
  }
  static Shape shape_of(int tile) {
    const AmxConfig& config = amx_state.config;
    expects(config.palette == 1, "tiles must be configured before they are used");
    expects(config.rows[tile] != 0, "a tile must have rows to be used");
    return {config.rows[tile], config.row_bytes[tile]};
  }

  // Checks the shapes of a product, and returns that of the sum.
  template <int kSum, int kLeft, int kRight>
  static Shape shape_of_product() {
    static_assert(kSum != kLeft && kSum != kRight && kLeft != kRight);
    const Shape sum = shape_of(kSum), left = shape_of(kLeft), right = shape_of(kRight);
    expects(sum.row_bytes % 4 == 0 && left.row_bytes % 4 == 0 && right.row_bytes % 4 == 0,
            "rows must hold whole dwords");
    expects(sum.rows == left.rows, "the sum must have the rows of the left side");
    expects(sum.row_bytes == right.row_bytes, "the sum must have the columns of the right side");
    expects(left.row_bytes / 4 == right.rows,
            "the left side must have one dword in a row for each row of the right side");
    return sum;
  }

  // Changes the columns that the tile has, and clears the others.
  static void store_row(int tile, int row, Vec v) {
    const auto size = static_cast<size_t>(shape_of(tile).row_bytes);
    __builtin_memset(amx_state.bytes[tile][row], 0, kAmxRowBytes);
    __builtin_memcpy(amx_state.bytes[tile][row], &v, size);
  }
  static void clear_rows(int tile, int first) {
    for (int row = first; row < kAmxRows; ++row) __builtin_memset(amx_state.bytes[tile][row], 0, kAmxRowBytes);
  }
  PC_FORCE_INLINE static Vec load_row(int tile, int row) {
    return pagecore::cpu::PC_ISA::load(reinterpret_cast<const float*>(amx_state.bytes[tile][row]));
  }
  PC_FORCE_INLINE static Vec without_denormals(Vec v) {
    const BitVec bits = (BitVec)v;
    return (Vec)((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
  }
  PC_FORCE_INLINE static Vec low(BitVec pairs) { return without_denormals((Vec)(pairs << 16)); }
  PC_FORCE_INLINE static Vec high(BitVec pairs) { return without_denormals((Vec)(pairs & 0xffff0000)); }
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
