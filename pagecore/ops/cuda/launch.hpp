// Launch geometry of the data-moving kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_src/abi/moves.h"
#include "pagecore/native/rounding.hpp"

namespace pagecore::cuda {

inline constexpr int64_t kThreads = 128;    // per block
inline constexpr int64_t kMaxInFlight = 4;  // units per thread
inline constexpr int64_t kResident = 2048;  // threads per multiprocessor
// Units are numbered in 32 bits. The last block of a grid numbers up to one grid's worth more, hence the margin.
inline constexpr int64_t kMaxUnits = (int64_t{1} << 31) - (int64_t{1} << 16);

// The dimensions of a grid.
struct Grid {
  int64_t x = 1;
  int64_t y = 1;
  int64_t z = 1;
};

[[nodiscard]] constexpr PcDivisor make_divisor(int64_t divisor) {
  PcDivisor result{static_cast<pc_int32>(divisor), 0, 0};
  while (int64_t{1} << result.shift < divisor) ++result.shift;
  const uint64_t power = uint64_t{1} << (31 + result.shift);
  result.multiplier = static_cast<unsigned>(ceil_div(power, static_cast<uint64_t>(divisor)));
  return result;
}

// Units that each thread moves: 1 until the units fill the device, then up to kMaxInFlight.
[[nodiscard]] constexpr int64_t units_per_thread(int64_t units, int64_t num_multiprocessors) {
  return std::clamp<int64_t>(ceil_div(units, num_multiprocessors * kResident), 1, kMaxInFlight);
}

// The y dimension of a grid that loops over `count` items with stride y; each item takes `blocks_per_item` blocks of
// the other dimensions. A grid of kGridBlocks fills any device and costs little if most blocks find no work.
[[nodiscard]] constexpr int64_t grid_rows(int64_t count, int64_t blocks_per_item) {
  constexpr int64_t kGridBlocks = int64_t{1} << 15, kMaxRows = 65535;
  return std::min(count, std::clamp<int64_t>(kGridBlocks / blocks_per_item, 1, kMaxRows));
}

[[nodiscard]] constexpr uint64_t bits_of(int64_t value) { return static_cast<uint64_t>(value); }

// Return true if accesses of `bytes`, at most 16 at once, are aligned at an address or stride. `bits` may be several
// addresses and strides, or-ed.
[[nodiscard]] constexpr bool allows(uint64_t bits, int64_t bytes) {
  return (bits & static_cast<uint64_t>(std::min<int64_t>(bytes, 16) - 1)) == 0;
}

}  // namespace pagecore::cuda
