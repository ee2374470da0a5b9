// Work that several threads share: the caller works too, and units are claimed one by one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace pagecore::cpu {

// More than any call may ask for are never started.
inline constexpr int64_t kMaxThreads = 1024;

// Runs work(context, unit, worker) once for every unit 0 .. num_units, on at most `num_threads` threads with the caller
// among them, and returns when all are done. No two calls at a time have the same worker, 0 <= worker < num_threads.
// The work must not throw. It rounds as the caller does: threads take over its floating-point environment.
//
// One call at a time has the threads: others that come meanwhile, from a unit of work or from another thread, work
// alone. The threads of a process are not those of its children: a child that was forked starts its own.
void run_units(int64_t num_units, int64_t num_threads, void (*work)(void* context, int64_t unit, int64_t worker),
               void* context);

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

template <typename Body>
void parallel_for(int64_t num_units, int64_t num_threads, Body&& body) {
  static_assert(std::is_nothrow_invocable_v<Body, int64_t, int64_t>, "units of work must not throw");
  run_units(
      num_units, num_threads,
      [](void* context, int64_t unit, int64_t worker) {
        (*static_cast<std::remove_reference_t<Body>*>(context))(unit, worker);
      },
      &body);
}

}  // namespace pagecore::cpu
