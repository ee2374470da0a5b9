// The AMX instructions, on its tiles: eight registers of up to 16 rows x 64 bytes.
//
// Inline assembly, because GCC 12 does not know which tile an instruction changes or that ldtilecfg reads its whole
// operand, and so drops stores to the operand.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr int kAmxRows = 16;
constexpr int kAmxRowBytes = 64;

// The operand of ldtilecfg.
struct alignas(64) AmxConfig {
  uint8_t palette = 0;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(AmxConfig) == 64 && offsetof(AmxConfig, palette) == 0 && offsetof(AmxConfig, start_row) == 1 &&
              offsetof(AmxConfig, row_bytes) == 16 && offsetof(AmxConfig, rows) == 48);

// Each statement is volatile, which keeps the statements in order, and clobbers memory, so that stores before an
// instruction are visible to it and its stores are visible afterwards. `stride` is in bytes.
struct HardwareAmx {
  PC_FORCE_INLINE static void configure(const AmxConfig& config) {
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  PC_FORCE_INLINE static void release() { asm volatile("tilerelease" : : : "memory"); }
  template <int T>
  PC_FORCE_INLINE static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T) : "memory");
  }
  template <int T>
  PC_FORCE_INLINE static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride) : "memory");
  }
  // For data that will not be read again soon.
  template <int T>
  PC_FORCE_INLINE static void load_once(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride) : "memory");
  }
  template <int T>
  PC_FORCE_INLINE static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(stride) : "memory");
  }
  // sum[m][n] += left[m][2k] * right[k][2n] + left[m][2k + 1] * right[k][2n + 1] over all k, bfloat16 to float32.
  template <int kSum, int kLeft, int kRight>
  PC_FORCE_INLINE static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight) : "memory");
  }
  // sum[m][n] += left[m][4k + i] * right[k][4n + i] over all k and i < 4, int8 to int32.
  template <int kSum, int kLeft, int kRight>
  PC_FORCE_INLINE static void multiply_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight) : "memory");
  }
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
