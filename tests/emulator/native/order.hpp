// The order of accesses to device memory within a launch.
//
// A barrier orders the accesses of two threads of one block, as in shared memory. A block may read a write of another
// block only after this chain:
//
//   write  [barrier]  pc_fence_device  atomic on A    ->    atomic on A  pc_fence_device  [barrier]  read
//
// The barriers are needed if the thread that writes or reads is not the thread of the fence. Two threads or blocks that
// write different bytes to one address without such an order are also reported. A read and a later write by another
// block are not reported; another order of the blocks shows them as wrong results. Launches are ordered.
#pragma once

#include <cstdint>

#include "shadow.hpp"

namespace emulator {

// Writes of one thread from one line of the source, between the same barriers and fences.
struct Write {
  uint32_t block = 0;
  int thread = 0;
  uint32_t num_fences = 0;  // of the thread before the write
  Epochs when;
  Site site;
};

// An atomic access of a thread, and the writes that its last fence covers.
struct Release {
  uint32_t block = 0;
  int thread = 0;
  uint32_t num_fences = 0;
  Epochs fenced;
};

// A release that a thread of another block has observed and followed by a fence.
struct Acquisition {
  Release release;
  int thread = 0;
  Epochs when;
};

}  // namespace emulator
