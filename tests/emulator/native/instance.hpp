// Description of a kernel instance, which its library exports to the emulator.
#pragma once

#include <cstdint>
#include <type_traits>

namespace emulator {

struct Instance {
  void (*kernel)(const void* parameters);
  uint64_t parameter_bytes;
  int max_threads;  // of PC_KERNEL
};

template <auto kKernel, int kMaxThreads>
struct Caller;

template <typename Parameters, void (*kKernel)(Parameters), int kMaxThreads>
struct Caller<kKernel, kMaxThreads> {
  static_assert(sizeof(Parameters) <= 4000, "a kernel takes at most 4,000 bytes");
  static_assert(std::is_trivially_copyable_v<Parameters>, "a kernel takes plain data");
  static void call(const void* parameters) { kKernel(*static_cast<const Parameters*>(parameters)); }
  static constexpr Instance instance{call, sizeof(Parameters), kMaxThreads};
};

constexpr int first_of(int threads, int) { return threads; }

}  // namespace emulator

// PC_INSTANCE(name, (threads), (kernel)): the arguments are in parentheses because they may contain commas.
#define PC_INSTANCE(name, max_threads, ...) \
  extern "C" const emulator::Instance name = emulator::Caller<(__VA_ARGS__), (max_threads)>::instance
