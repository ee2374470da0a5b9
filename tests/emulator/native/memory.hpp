// Device memory: allocations in reserved ranges of addresses. An address is never used for two allocations.
#pragma once

#include "machine.hpp"

namespace emulator {

// Returns an address that is a multiple of 256 and of no larger power of two, with inaccessible pages on both sides; 0
// if the system has not enough memory.
uint64_t allocate(uint64_t num_bytes);
// Returns false if no allocation begins at `address`.
bool release(uint64_t address);

// Returns true if an address is in a reserved range.
bool is_device(uint64_t address);

// Adds memory of the host that kernels may access.
void add_host_memory(uint64_t begin, uint64_t num_bytes);

// Describes an invalid address relative to `allocation`, or to the nearest allocation if that is null.
void describe(char* text, uint64_t size, uint64_t address, const Allocation* allocation);

}  // namespace emulator
