// The order of accesses to device memory within a launch.
//
// A barrier orders the accesses of two threads of one block, as in shared memory. A block may read a write of another
// block only after this chain:
//
//   write  [barrier]  pc_fence_device  atomic on A    ->    atomic on A  pc_fence_device  [barrier]  read
//
// The barriers are needed if the thread that writes or reads is not the thread of the fence. The same holds for a read
// and a later write that changes the bytes, and for two writes of different bytes. Only the last read of a byte is
// held, and reads of an allocation only from the first write of a kernel to it on. Launches are ordered.
#pragma once

#include <cstdint>

#include "shadow.hpp"

namespace emulator {

// Writes, or reads, of one thread from one line of the source, between the same barriers and fences.
struct Access {
  uint32_t block = 0;
  int thread = 0;
  uint32_t num_fences = 0;  // of the thread before the access
  Epochs when;
  Site site;
  bool once = false;  // read by load_vector_once
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
