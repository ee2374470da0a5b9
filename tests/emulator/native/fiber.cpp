#include "fiber.hpp"

#include <pthread.h>

#include <cstdint>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Callee-saved registers are pushed on the stack of the fiber that is left.
asm(R"(
.text
.hidden pc_switch_stacks
.globl pc_switch_stacks
.type pc_switch_stacks, @function
pc_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pc_switch_stacks, . - pc_switch_stacks
)");
#elif defined(__aarch64__)
asm(R"(
.text
.hidden pc_switch_stacks
.globl pc_switch_stacks
.type pc_switch_stacks, %function
pc_switch_stacks:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size pc_switch_stacks, . - pc_switch_stacks
)");
#endif

#if defined(__x86_64__) || defined(__aarch64__)
extern "C" __attribute__((visibility("hidden"))) void pc_switch_stacks(void** saved, void* next);
#endif

namespace emulator {

namespace {

void exchange(Fiber& from, Fiber& to) {
#if defined(__x86_64__) || defined(__aarch64__)
  pc_switch_stacks(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
}

}  // namespace

void prepare(Fiber& fiber, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber.stack, fiber.stack_size);  // poisoned by the previous use of the stack
  fiber.shadow = nullptr;
#endif
  char* const top = fiber.stack + fiber.stack_size;
#if defined(__x86_64__)
  // Six registers, the return address of the switch, and a null return address of `entry`. At `entry` the stack is
  // aligned as after a call.
  void** frame = reinterpret_cast<void**>(top) - 8;
  for (int i = 0; i < 8; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = frame;
#elif defined(__aarch64__)
  void** frame = reinterpret_cast<void**>(top - 160);
  for (int i = 0; i < 20; ++i) frame[i] = nullptr;
  frame[11] = reinterpret_cast<void*>(entry);  // x30
  fiber.stack_pointer = frame;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = fiber.stack_size;
  fiber.context.uc_link = nullptr;
  (void)top;
  makecontext(&fiber.context, entry, 0);
#endif
}

void switch_fibers(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.shadow, to.stack, to.stack_size);
  exchange(from, to);
  __sanitizer_finish_switch_fiber(from.shadow, nullptr, nullptr);
#else
  exchange(from, to);
#endif
}

void leave_fiber(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(nullptr, to.stack, to.stack_size);
#endif
  exchange(from, to);
  std::abort();  // unreachable: the fiber is never resumed
}

void entered_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

void describe_own_stack(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  pthread_attr_t attributes;
  void* stack = nullptr;
  size_t size = 0;
  if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
    pthread_attr_getstack(&attributes, &stack, &size);
    pthread_attr_destroy(&attributes);
  }
  fiber.stack = static_cast<char*>(stack);
  fiber.stack_size = size;
#else
  (void)fiber;
#endif
}

}  // namespace emulator
