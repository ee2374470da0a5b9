// A thread pool: the caller works too, and threads claim units one by one.
#pragma once

#include <cstdint>
#include <type_traits>

namespace pagecore::cpu {

// Upper limit of the pool size.
inline constexpr int64_t kMaxThreads = 1024;

// Runs work(context, unit, worker) once for each unit 0 .. num_units on at most `num_threads` threads, including the
// caller, and returns when all units are done. Concurrent calls of work() have different worker numbers, 0 <= worker <
// num_threads. work() must not throw. Threads adopt the caller's floating-point environment, and so its rounding mode.
//
// Only one call at a time uses the pool. Concurrent calls, and calls from within a unit of work, run single-threaded. A
// forked child does not inherit the threads and starts its own.
void run_units(int64_t num_units, int64_t num_threads, void (*work)(void* context, int64_t unit, int64_t worker),
               void* context);

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
