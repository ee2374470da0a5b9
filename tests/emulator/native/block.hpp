// The threads of the running block.
//
// States of a thread: ready -> waiting (at a collective of its warp) -> ready
//                           -> at the barrier (of the block) -> ready
//                           -> finished
// I1: the threads of a warp never wait at two collectives, or at a collective and at the barrier.
// I2: no thread is finished while another one is waiting or at the barrier.
// I3: by I1 and I2 the running thread finds a ready thread, or is the last of its warp or block to arrive.
#pragma once

#include <cstring>

#include "fiber.hpp"
#include "machine.hpp"
#include "shadow.hpp"

namespace emulator {

struct Thread {
  Fiber fiber;
  const void* operand = nullptr;  // of the collective at which the thread waits; on its stack
};

// Bits of masks, and indices of `threads`, are positions in the order in which lanes run.
struct Warp {
  uint32_t present = 0;  // lanes that the launch has
  uint32_t alive = 0;
  uint32_t waiting = 0;
  uint32_t at_barrier = 0;
  uint32_t epoch = 0;               // counts pc_sync_warp
  const char* operation = nullptr;  // at which `waiting` threads are
  Site site;
};

struct Block {
  Warp warps[kMaxThreads / kLanes];
  Thread threads[kMaxThreads];
  int num_warps = 0;
  int num_alive = 0;
  int num_at_barrier = 0;
  uint32_t epoch = 0;  // counts pc_sync_block, over all blocks of a launch
  Site barrier_site;
};
[[gnu::visibility("hidden")]] extern Block block;

// The entry point of a kernel.
using Kernel = void (*)(const void* parameters);

struct Launch {
  const char* name;
  Kernel kernel;
  const void* parameters;
  int num_blocks[3];
  int num_threads;
  uint32_t shared_bytes;
  bool may_overwrite;  // several threads may write different values to one address
  uint64_t seed;       // of the order in which blocks, warps and lanes run; 0: by number
};

// Runs all blocks. Returns null, or an error message, which is valid until the next launch.
const char* run(const Launch& launch);

// Waits for all lanes of the warp. The last lane to arrive calls `work` with the operands, indexed by lane.
void meet(const char* operation, const void* operand, void (*work)(const void* const (&operands)[kLanes]), Site site);

// Returns the running thread and its current epochs.
Accessor running_thread();

// Attributes errors to another lane of the running warp.
void act_as_lane(int lane);

// ---- shared memory and copies (shared.cpp)

void begin_block_of_shared(uint32_t num_bytes);
// Fails if the finishing thread has copies in flight.
void expect_no_copies();
// Returns 16 bytes of the buffer, read by all lanes of a warp.
const unsigned char* read_row(uint32_t address, Site site);

// ---- device memory

// Accesses of the running thread since it last waited. A thread that exceeds the maximum spins on another block.
[[gnu::visibility("hidden")]] extern uint32_t num_accesses;
inline constexpr uint32_t kMaxAccesses = 1 << 24;

// Ends the launch unless an asynchronous copy may read `num_bytes` (device.cpp).
void expect_copyable(uint64_t address, uint32_t num_bytes, const Allocation* made_from, Site site);

// Reports an access outside the allocation of its pointer, or outside all allocations if `allocation` is null.
[[noreturn]] void fail_access(const char* what, uint64_t address, uint64_t num_bytes, const Allocation* allocation,
                              Site site);
[[noreturn]] void fail_alignment(const char* what, uint64_t address, uint64_t alignment, Site site);
[[noreturn]] void fail_endless(Site site);

// Copies the bytes of an access; the usual sizes without a call.
inline void copy_bytes(void* target, const void* source, uint32_t num_bytes) {
  switch (num_bytes) {
    case 1: std::memcpy(target, source, 1); return;
    case 2: std::memcpy(target, source, 2); return;
    case 4: std::memcpy(target, source, 4); return;
    case 8: std::memcpy(target, source, 8); return;
    case 16: std::memcpy(target, source, 16); return;
    default: std::memcpy(target, source, num_bytes);
  }
}

// ---- the order of accesses to device memory (order.cpp)

// Record accesses, to check their order among threads and blocks. A write is recorded before it is done.
// `once`: by load_vector_once, of bytes that no thread writes during the launch.
void note_device_read(const Allocation& allocation, uint64_t address, uint32_t num_bytes, bool once, Site site);
void note_device_write(const Allocation& allocation, uint64_t address, const void* value, uint32_t num_bytes,
                       Site site);
void note_device_atomic(const Allocation& allocation, uint64_t address, uint32_t num_bytes);

void begin_launch_of_order(bool may_overwrite);
void begin_block_of_order(uint32_t number);
void end_launch_of_order();

}  // namespace emulator
