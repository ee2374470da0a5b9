// Device memory: pieces of one reserved range of addresses, none of which is ever used for two of them.
#pragma once

#include "machine.hpp"

namespace emulator {

// At a multiple of 256 and of nothing larger, with unusable pages around it; 0 where the system has not that much.
uint64_t allocate(uint64_t num_bytes);
// False where none begins at `address`.
bool release(uint64_t address);

// Whether an address is of the reserved range.
bool is_device(uint64_t address);

// Memory of the host that kernels may use as well.
void add_host_memory(uint64_t begin, uint64_t num_bytes);

// Describes an address that is not where it should be: in `allocation`, or in any where that is null.
void describe(char* text, uint64_t size, uint64_t address, const Allocation* allocation);

}  // namespace emulator
