// How much the caches of this machine hold.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pagecore::cpu {

// Bytes of a core's second-level cache, looked up once.
[[nodiscard]] int64_t l2_bytes();

// How many of `num_threads` work of this length is worth: a thread that sleeps takes some 25 us to come, and what is
// shared should be longer than the wait. One that comes too late costs the caller 2 us.
[[nodiscard]] inline int64_t worthwhile_threads(double work_us, int64_t num_threads) {
  constexpr double kUsPerThread = 25.0;
  if (work_us >= kUsPerThread * static_cast<double>(num_threads)) return num_threads;
  return std::max<int64_t>(1, static_cast<int64_t>(work_us / kUsPerThread));
}

// What one fast core reads or writes in a microsecond. On a slower one the same work takes longer than it seems: then
// it is shared somewhat late, which costs less than threads that come for nothing.
inline constexpr double kBytesPerUs = 16e3;

[[nodiscard]] inline int64_t threads_to_move(int64_t bytes, int64_t num_threads) {
  return worthwhile_threads(static_cast<double>(bytes) / kBytesPerUs, num_threads);
}

}  // namespace pagecore::cpu
