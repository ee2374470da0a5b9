// Stacks to switch between, within one thread.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace emulator {

struct Fiber {
#if defined(__x86_64__) || defined(__aarch64__)
  void* stack_pointer = nullptr;  // of a fiber that is not running
#else
  ucontext_t context;
#endif
  char* stack = nullptr;
  size_t stack_size = 0;
  void* shadow = nullptr;  // what AddressSanitizer keeps of it meanwhile
};

// The fiber's stack must be set. When first switched to, it calls `entry`, which must not return.
void prepare(Fiber& fiber, void (*entry)());

void switch_fibers(Fiber& from, Fiber& to);

// For a fiber that will not run again.
[[noreturn]] void leave_fiber(Fiber& from, Fiber& to);

// What every entry does first, and a thread before it switches away from its own stack.
void entered_fiber();
void describe_own_stack(Fiber& fiber);

}  // namespace emulator
