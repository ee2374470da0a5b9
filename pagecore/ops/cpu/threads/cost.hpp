// Cost estimates: how many threads a call is worth, and whether it should bypass the caches.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pagecore::cpu {

// Bytes of a core's L2 cache; determined once.
[[nodiscard]] int64_t l2_bytes();

// The number of threads, up to `num_threads`, that work of this length is worth. A sleeping thread takes about 25 us to
// arrive, and shared work should last longer than that. A thread that arrives too late costs the caller 2 us.
[[nodiscard]] inline int64_t worthwhile_threads(double work_us, int64_t num_threads) {
  constexpr double kUsPerThread = 25.0;
  if (work_us >= kUsPerThread * static_cast<double>(num_threads)) return num_threads;
  return std::max<int64_t>(1, static_cast<int64_t>(work_us / kUsPerThread));
}

// Bytes that one fast core reads or writes in a microsecond. On a slower core the same work takes longer than estimated
// and is shared somewhat late, which costs less than threads that arrive for nothing.
inline constexpr double kBytesPerUs = 16e3;

[[nodiscard]] inline int64_t threads_to_move(int64_t bytes, int64_t num_threads) {
  return worthwhile_threads(static_cast<double>(bytes) / kBytesPerUs, num_threads);
}

}  // namespace pagecore::cpu
