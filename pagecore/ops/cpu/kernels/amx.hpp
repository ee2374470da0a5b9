// The instructions of AMX, on its tiles: eight registers of up to 16 rows x 64 bytes each.
//
// As inline assembly, because GCC 12 knows neither which tile an instruction changes nor that ldtilecfg reads the whole
// of its operand, and drops stores to it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row

// What ldtilecfg reads.
struct alignas(64) TileConfig {
  uint8_t palette = 0;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64 && offsetof(TileConfig, palette) == 0 && offsetof(TileConfig, start_row) == 1 &&
              offsetof(TileConfig, row_bytes) == 16 && offsetof(TileConfig, rows) == 48);

// Every one is volatile, so that they stay in their order, and touches memory, so that what they read is written before
// them and what they write is read behind them. `stride` is in bytes.
struct HardwareTiles {
  PC_FORCE_INLINE static void configure(const TileConfig& config) {
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
  // Of what will not be read again soon.
  template <int T>
  PC_FORCE_INLINE static void load_once(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride) : "memory");
  }
  template <int T>
  PC_FORCE_INLINE static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(stride) : "memory");
  }
  // sum[m][n] += left[m][2k] * right[k][2n] + left[m][2k + 1] * right[k][2n + 1] over k: bfloat16 to float32.
  template <int kSum, int kLeft, int kRight>
  PC_FORCE_INLINE static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight) : "memory");
  }
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
