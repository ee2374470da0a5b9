// What a library of one kernel instance tells the emulator.
#pragma once

#include <cstdint>
#include <type_traits>

namespace emulator {

struct Instance {
  void (*kernel)(const void* parameters);
  uint64_t parameter_bytes;
};

template <auto kKernel>
struct Caller;

template <typename Parameters, void (*kKernel)(Parameters)>
struct Caller<kKernel> {
  static_assert(sizeof(Parameters) <= 4000, "a kernel takes at most 4,000 bytes");
  static_assert(std::is_trivially_copyable_v<Parameters>, "a kernel takes plain data");
  static void call(const void* parameters) { kKernel(*static_cast<const Parameters*>(parameters)); }
  static constexpr Instance instance{call, sizeof(Parameters)};
};

}  // namespace emulator

#define PC_INSTANCE(...) extern "C" const emulator::Instance pc_instance = emulator::Caller<(__VA_ARGS__)>::instance
