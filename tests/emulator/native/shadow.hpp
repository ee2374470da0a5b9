// Shadow memory of the shared buffer: the last writer of each word or byte, and its readers since the last barriers.
//
// Two accesses by different threads, at least one of them a write, are a race unless a barrier separates them: a
// barrier of the block, or, for lanes of one warp, of the warp. Shuffles and matrix instructions are not barriers. The
// shadow holds the last writer and the readers of the current epochs, so that a race is found in every order of
// threads.
#pragma once

#include <bit>
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

// The state of a vector of 16 bytes; or of a word of it, or a byte of that, if smaller parts were accessed separately.
struct alignas(32) Shadow {
  Epochs written;             // by the thread `writer`
  Epochs read;                // the latest read
  uint32_t reader_warps = 0;  // in that epoch of the block
  uint32_t reader_lanes = 0;  // in that epoch of the warp; valid while only one warp has read
  uint16_t writer = 0;
  uint16_t write_line = 0;
  uint16_t read_line = 0;
  bool in_flight : 1 = false;  // an asynchronous copy of `writer` has not finished
  bool split : 1 = false;      // its parts have shadows of their own
  bool atomic : 1 = false;     // the last write was atomic
  bool shared : 1 = false;     // atomic writes of other threads precede it, without a barrier between
};

// The error of an access: a message, or null if there is none. `thread` and `line` are of the earlier access.
struct Finding {
  const char* what = nullptr;
  int thread = 0;
  int line = 0;
};

inline int thread_of(int warp, uint32_t lanes) { return warp * kLanes + std::countr_zero(lanes); }

inline bool written_by_another(const Shadow& shadow, const Accessor& accessor) {
  const int warp = shadow.writer / kLanes;
  if (shadow.written.block == 0) return false;
  if (shadow.shared) return shadow.written.block == accessor.now.block;
  if (is_ordered(shadow.written, warp, accessor)) return false;
  return warp != accessor.warp || accessor.lanes != 1u << shadow.writer % kLanes;
}

inline Finding note_read(Shadow& shadow, const Accessor& reader, Site site) {
  if (shadow.in_flight) [[unlikely]]
    return {"reads what the copy of thread %d (line %u) has in flight", shadow.writer, shadow.write_line};
  if (shadow.written.block == 0) [[unlikely]]
    return {"reads uninitialised memory"};
  if (written_by_another(shadow, reader)) [[unlikely]] {
    return {reader.lanes == ~0u ? "races: the warp reads what thread %d writes (line %u), without a barrier between"
                                : "races: it reads what thread %d writes (line %u), without a barrier between",
            shadow.writer, shadow.write_line};
  }
  if (shadow.read.block != reader.now.block) shadow.reader_warps = 0;
  if (shadow.reader_warps != 1u << reader.warp || shadow.read.warp != reader.now.warp) shadow.reader_lanes = 0;
  shadow.read = reader.now;
  shadow.reader_warps |= 1u << reader.warp;
  shadow.reader_lanes |= reader.lanes;
  shadow.read_line = static_cast<uint16_t>(site.line());
  return {};
}

inline Finding note_write(Shadow& shadow, const Accessor& writer, Site site) {
  if (shadow.in_flight) [[unlikely]]
    return {"writes what the copy of thread %d (line %u) has in flight", shadow.writer, shadow.write_line};
  if (written_by_another(shadow, writer)) [[unlikely]] {
    return {"races: it writes what thread %d writes (line %u), without a barrier between", shadow.writer,
            shadow.write_line};
  }
  if (shadow.read.block == writer.now.block) {
    const uint32_t others = shadow.reader_warps & ~(1u << writer.warp);
    const uint32_t lanes = shadow.read.warp == writer.now.warp ? shadow.reader_lanes & ~writer.lanes : 0;
    if (others != 0) {
      return {"races: it writes what thread %d or another of its warp reads (line %u), without a barrier between",
              thread_of(std::countr_zero(others), 1), shadow.read_line};
    }
    if (shadow.reader_warps != 0 && lanes != 0) {
      return {"races: it writes what thread %d reads (line %u), without a barrier between",
              thread_of(writer.warp, lanes), shadow.read_line};
    }
  }
  shadow.written = writer.now;
  shadow.writer = static_cast<uint16_t>(thread_of(writer.warp, writer.lanes));
  shadow.write_line = static_cast<uint16_t>(site.line());
  shadow.atomic = shadow.shared = false;
  return {};
}

// An atomic read and write, which may race with others of its kind.
Finding note_atomic(Shadow& shadow, const Accessor& writer, Site site);

}  // namespace emulator
