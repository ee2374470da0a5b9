// Fibers: stacks between which one thread of the host switches.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace emulator {

struct Fiber {
#if defined(__x86_64__) || defined(__aarch64__)
  void* stack_pointer = nullptr;  // while the fiber is not running
#else
  ucontext_t context;
#endif
  char* stack = nullptr;
  size_t stack_size = 0;
  void* shadow = nullptr;  // AddressSanitizer's state while the fiber is not running
};

// Prepares a fiber whose stack is set. The first switch to the fiber calls `entry`, which must not return.
void prepare(Fiber& fiber, void (*entry)());

void switch_fibers(Fiber& from, Fiber& to);

// Switches from a fiber that will not run again.
[[noreturn]] void leave_fiber(Fiber& from, Fiber& to);

// Every `entry` must call entered_fiber first. A thread must call describe_own_stack before its first switch.
void entered_fiber();
void describe_own_stack(Fiber& fiber);

}  // namespace emulator
