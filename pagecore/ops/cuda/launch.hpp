// What launches of the data-moving kernels have in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_src/abi_moves.h"
#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cuda {

inline constexpr int64_t kThreads = 128;    // of a block
inline constexpr int64_t kMaxInFlight = 4;  // units of a thread
inline constexpr int64_t kResident = 2048;  // threads of a multiprocessor
// Numbers of units are 32-bit, and threads at the end of a grid count a little further.
inline constexpr int64_t kMaxUnits = (int64_t{1} << 31) - (int64_t{1} << 16);

// The three numbers of a grid.
struct Grid {
  int64_t x = 1;
  int64_t y = 1;
  int64_t z = 1;
};

[[nodiscard]] constexpr int64_t ceil_div(int64_t n, int64_t by) { return n / by + (n % by != 0); }

[[nodiscard]] constexpr PcDivisor make_divisor(int64_t divisor) {
  PcDivisor result{static_cast<pc_int32>(divisor), 0, 0};
  while (int64_t{1} << result.shift < divisor) ++result.shift;
  const uint64_t power = uint64_t{1} << (31 + result.shift), by = static_cast<uint64_t>(divisor);
  result.multiplier = static_cast<unsigned>((power + by - 1) / by);
  return result;
}

// One unit a thread until every thread that the device holds has one, then more.
[[nodiscard]] constexpr int64_t units_per_thread(int64_t units, int64_t num_multiprocessors) {
  return std::clamp<int64_t>(ceil_div(units, num_multiprocessors * kResident), 1, kMaxInFlight);
}

// The y axis of a grid whose blocks of threads take every y-th of `count` pieces of work, where each piece takes `each`
// blocks of the other axes. A grid of kGridBlocks fills any device, and costs little where most blocks find no work.
[[nodiscard]] constexpr int64_t grid_rows(int64_t count, int64_t each) {
  constexpr int64_t kGridBlocks = int64_t{1} << 15, kMaxRows = 65535;
  return std::min(count, std::clamp<int64_t>(kGridBlocks / each, 1, kMaxRows));
}

// Of a length of which what comes behind is out of a kernel's reach.
[[nodiscard]] constexpr pc_int32 clamped(int64_t length) {
  return static_cast<pc_int32>(std::min<int64_t>(length, INT32_MAX));
}

[[nodiscard]] constexpr uint64_t bits_of(int64_t value) { return static_cast<uint64_t>(value); }

// Whether an address or a stride, or several of them or-ed, allow accesses of `bytes`, of which 16 are the most at
// once.
[[nodiscard]] constexpr bool allows(uint64_t bits, int64_t bytes) {
  return (bits & static_cast<uint64_t>(std::min<int64_t>(bytes, 16) - 1)) == 0;
}

// Arrays in device memory, as kernels are told of them.
[[nodiscard]] inline PcIndices device_indices(const cpu::Indices& indices) {
  return {reinterpret_cast<uintptr_t>(indices.data), indices.stride / (indices.wide ? 8 : 4), clamped(indices.size),
          indices.wide};
}

[[nodiscard]] inline PcTable device_table(const cpu::Table& table) {
  PcTable result = {};
  result.data = reinterpret_cast<uintptr_t>(table.data);
  result.row_stride = table.row_stride / (table.wide ? 8 : 4);
  result.num_rows = clamped(table.num_rows);
  result.width = clamped(table.width);
  result.wide = table.wide;
  return result;
}

}  // namespace pagecore::cuda
