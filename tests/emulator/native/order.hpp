// The order of accesses to device memory within a launch.
//
// Of two threads of one block a barrier orders the accesses, as in shared memory. What one block writes another may
// read only behind this chain:
//
//   write  [barrier]  pc_fence_device  atomic on A    ->    atomic on A  pc_fence_device  [barrier]  read
//
// The barriers are needed where the thread that writes or reads is another one than that of the fence. Two threads or
// blocks that write different bytes to one place without such an order are reported, too; a read and a later write by
// another block are not: running the blocks in another order shows those. Launches are in order.
#pragma once

#include <cstdint>

#include "shadow.hpp"

namespace emulator {

// Writes of one thread at one place of the source, between the same barriers and fences.
struct Write {
  uint32_t block = 0;
  int thread = 0;
  uint32_t num_fences = 0;  // that the thread had behind it
  Epochs when;
  Site site;
};

// A thread's atomic access, with what its last fence covers.
struct Release {
  uint32_t block = 0;
  int thread = 0;
  uint32_t num_fences = 0;
  Epochs fenced;
};

// A release that another block's thread has seen, fence included.
struct Acquisition {
  Release release;
  int thread = 0;
  Epochs when;
};

}  // namespace emulator
