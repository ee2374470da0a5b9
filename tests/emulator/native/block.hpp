// The threads of the block that runs.
//
// States of a thread: ready -> waiting (at a collective of its warp) -> ready
//                           -> at the barrier (of the block) -> ready
//                           -> finished
// I1: of a warp, threads are never waiting at two collectives, or at a collective and at the barrier.
// I2: no thread is finished while another one is waiting or at the barrier.
// I3: so whoever runs finds somebody ready, or is the last of its warp or block to arrive.
#pragma once

#include "fiber.hpp"
#include "machine.hpp"
#include "shadow.hpp"

namespace emulator {

struct Thread {
  Fiber fiber;
  const void* operand = nullptr;  // what it brings to the collective it waits at; lies on its stack
};

// Masks are by place in the order in which lanes run; `threads` are by place as well.
struct Warp {
  uint32_t present = 0;  // lanes that the launch has
  uint32_t alive = 0;
  uint32_t waiting = 0;
  uint32_t at_barrier = 0;
  uint32_t epoch = 0;               // counts pc_sync_warp
  const char* operation = nullptr;  // that `waiting` threads are at
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
extern Block block;

// What all threads call.
using Kernel = void (*)(const void* parameters);

struct Launch {
  const char* name;
  Kernel kernel;
  const void* parameters;
  int num_blocks[3];
  int num_threads;
  uint32_t shared_bytes;
  bool may_overwrite;  // several threads may write different values to one place
  uint64_t seed;       // of the order in which blocks, warps and lanes run; 0: as they are numbered
};

// Runs all blocks; returns null, or what went wrong, which stands until the next launch.
const char* run(const Launch& launch);

// Waits for all lanes. The last to arrive calls `work` with each lane's operand, by lane.
void meet(const char* operation, const void* operand, void (*work)(const void* const (&operands)[kLanes]),
          const Site& site);

// The running thread and when it runs.
Accessor running_thread();

// Lets errors name another lane of the running warp.
void speak_for_lane(int lane);

// ---- shared memory and copies (shared.cpp)

void begin_block_of_shared(uint32_t num_bytes);
// Of a thread that finishes.
void expect_no_copies(const Site& site);
// 16 bytes of the buffer, read by all lanes of a warp.
const unsigned char* read_row(uint32_t address, const Site& site);

// ---- the order of accesses to device memory (order.cpp)

void begin_launch_of_order(bool may_overwrite);
void begin_block_of_order(uint32_t number);
void end_launch_of_order();

}  // namespace emulator
