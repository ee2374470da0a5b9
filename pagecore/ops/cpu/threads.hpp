// Work that several threads share: the caller works too, and units are claimed one by one.
#pragma once

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
