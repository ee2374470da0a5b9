// What is known of each piece of the shared buffer: who wrote it and who has read it since which barrier.
//
// Two accesses by different threads, at least one of them a write, are a race unless a barrier lies between them: that
// of the block, or for lanes of one warp also that of the warp. Shuffles and matrix instructions are none. Because the
// last writer and the readers of the current epochs are kept, a race is found in whatever order threads run.
#pragma once

#include <cstdint>

#include "machine.hpp"

namespace emulator {

// When: barriers of the block, and of the accessing thread's warp.
struct Epochs {
  uint32_t block = 0;  // 0: never
  uint32_t warp = 0;
};

// Threads of one warp that access together; `lanes` are bits.
struct Accessor {
  int warp;
  uint32_t lanes;
  Epochs now;
};

// Whether a barrier lies between what `warp` did and an access now.
inline bool is_ordered(const Epochs& before, int warp, const Accessor& now) {
  return before.block < now.now.block || (warp == now.warp && before.warp < now.now.warp);
}

// A word, or a byte of a word whose bytes were accessed one by one.
struct Shadow {
  Epochs written;             // by the thread `writer`
  Epochs read;                // the latest reading
  uint32_t reader_warps = 0;  // in that epoch of the block
  uint32_t reader_lanes = 0;  // in that epoch of the warp; of use while only one warp has read
  uint16_t writer = 0;
  bool in_flight = false;  // an asynchronous copy of `writer`
  bool split = false;      // a word whose bytes are kept one by one
  Site write_site;
  Site read_site;
};

// What is wrong with an access, for the message; null where nothing is. `other` is the place of the earlier access.
struct Finding {
  const char* what = nullptr;
  int thread = 0;
  Site other;
};

Finding note_read(Shadow& shadow, const Accessor& reader, const Site& site);
Finding note_write(Shadow& shadow, const Accessor& writer, const Site& site);

}  // namespace emulator
