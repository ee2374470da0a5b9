// Shadow memory of the shared buffer: the last writer of each word or byte, and its readers since the last barriers.
//
// Two accesses by different threads, at least one of them a write, are a race unless a barrier separates them: a
// barrier of the block, or, for lanes of one warp, of the warp. Shuffles and matrix instructions are not barriers. The
// shadow holds the last writer and the readers of the current epochs, so that a race is found in every order of
// threads.
#pragma once

#include <cstdint>

#include "machine.hpp"

namespace emulator {

// The time of an access: barriers so far of the block, and of the accessing thread's warp.
struct Epochs {
  uint32_t block = 0;  // 0: never
  uint32_t warp = 0;
};

// Threads of one warp that access together; `lanes` is a mask.
struct Accessor {
  int warp;
  uint32_t lanes;
  Epochs now;
};

// Returns true if a barrier separates an earlier access of `warp` from an access now.
inline bool is_ordered(const Epochs& before, int warp, const Accessor& now) {
  return before.block < now.now.block || (warp == now.warp && before.warp < now.now.warp);
}

// The state of a word, or of a byte of a word whose bytes were accessed separately.
struct Shadow {
  Epochs written;             // by the thread `writer`
  Epochs read;                // the latest read
  uint32_t reader_warps = 0;  // in that epoch of the block
  uint32_t reader_lanes = 0;  // in that epoch of the warp; valid while only one warp has read
  uint16_t writer = 0;
  bool in_flight = false;  // an asynchronous copy of `writer` has not finished
  bool split = false;      // a word whose bytes have shadows of their own
  bool atomic = false;     // the last write was atomic
  bool shared = false;     // atomic writes of other threads precede it, without a barrier between
  Site write_site;
  Site read_site;
};

// The error of an access: a message, or null if there is none. `other` is the place of the earlier access.
struct Finding {
  const char* what = nullptr;
  int thread = 0;
  Site other;
};

Finding note_read(Shadow& shadow, const Accessor& reader, Site site);
Finding note_write(Shadow& shadow, const Accessor& writer, Site site);
// An atomic read and write, which may race with others of its kind.
Finding note_atomic(Shadow& shadow, const Accessor& writer, Site site);

}  // namespace emulator
