// Functions that Python calls.
#include <cstdio>
#include <cstring>
#include <mutex>

#include "block.hpp"
#include "instance.hpp"
#include "memory.hpp"

namespace {

std::mutex mutex;

}  // namespace

extern "C" {

uint64_t pc_allocate(uint64_t num_bytes) {
  const std::lock_guard lock(mutex);
  return emulator::allocate(num_bytes);
}

int pc_release(uint64_t address) {
  const std::lock_guard lock(mutex);
  return emulator::release(address);
}

void pc_add_host_memory(uint64_t begin, uint64_t num_bytes) {
  const std::lock_guard lock(mutex);
  emulator::add_host_memory(begin, num_bytes);
}

void pc_plant(int fault) {
  const std::lock_guard lock(mutex);
  emulator::planted_fault = fault;
}

int pc_is_device(uint64_t address) { return emulator::is_device(address); }

// Returns 1 if `num_bytes` from `address` on are in one allocation; otherwise 0, and describes the address in `text`.
int pc_check_memory(uint64_t address, uint64_t num_bytes, char* text, uint64_t text_size) {
  const std::lock_guard lock(mutex);
  const emulator::Allocation* found = emulator::find_allocation(address);
  if (found != nullptr && found->holds(address, num_bytes)) return 1;
  emulator::describe(text, text_size, address, found);
  return 0;
}

// Returns 0, or 1 with an error message in `text`.
int pc_launch(const char* name, const emulator::Instance* instance, const void* parameters, const int* num_blocks,
              int num_threads, uint32_t shared_bytes, int may_overwrite, uint64_t seed, emulator::Counts* counts,
              char* text, uint64_t text_size) {
  const std::lock_guard lock(mutex);
  const char* message = emulator::run({.name = name,
                                       .kernel = instance->kernel,
                                       .parameters = parameters,
                                       .num_blocks = {num_blocks[0], num_blocks[1], num_blocks[2]},
                                       .num_threads = num_threads,
                                       .shared_bytes = shared_bytes,
                                       .may_overwrite = may_overwrite != 0,
                                       .seed = seed});
  *counts = emulator::counts;
  if (message == nullptr) return 0;
  std::snprintf(text, text_size, "%s", message);
  return 1;
}
}
