// Stores that pass the caches by, a whole line at a time: what is written once and not read again soon need not be read
// before it is written, and drives out nothing.
#pragma once

#include "pagecore/ops/cpu/kernels/vec.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr int64_t kLine = 64;

PC_FORCE_INLINE void copy_bytes(char* to, const char* from, int64_t count) {
  __builtin_memcpy(to, from, static_cast<size_t>(count));
}

// `to` is the start of a line.
PC_FORCE_INLINE void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
#pragma GCC unroll 2
  for (int i = 0; i < kLine; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
#elif defined(__x86_64__)
#pragma GCC unroll 4
  for (int i = 0; i < kLine; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#else
  __builtin_memcpy(to, from, kLine);
#endif
}

// One line to any address.
PC_FORCE_INLINE void copy_line(char* to, const char* from) {
#pragma GCC unroll 4
  for (size_t i = 0; i < kLine; i += sizeof(Vec)) {
    store(reinterpret_cast<float*>(to + i), load(reinterpret_cast<const float*>(from + i)));
  }
}

// Asks for a line that will be read soon; any address will do.
PC_FORCE_INLINE void fetch_line(const char* p) { __builtin_prefetch(p, 0, 2); }

PC_FORCE_INLINE void fetch(const char* p, int64_t count) {
  for (int64_t i = 0; i < count; i += kLine) fetch_line(p + i);
}

// Calls move(to, from) for each of the `count / kLine` lines, and asks for what lies `ahead` of each.
template <typename MoveLine>
PC_FORCE_INLINE void move_lines(char* to, const char* from, int64_t count, int64_t ahead, MoveLine&& move) {
  int64_t i = 0;
  for (; i + 4 * kLine <= count; i += 4 * kLine) {
#pragma GCC unroll 4
    for (int64_t line = 0; line < 4 * kLine; line += kLine) fetch_line(from + i + line + ahead);
#pragma GCC unroll 4
    for (int64_t line = 0; line < 4 * kLine; line += kLine) move(to + i + line, from + i + line);
  }
  for (; i + kLine <= count; i += kLine) {
    fetch_line(from + i + ahead);
    move(to + i, from + i);
  }
}

// Streamed stores come after everything that other threads see of this one later.
PC_FORCE_INLINE void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Collects bytes that belong to consecutive addresses, wherever they come from and whatever their number, until they
// make lines.
//
//   bytes   [. . . . begin === === === end . . . . . . . . .]
//           ^ belongs at `line`, the start of a line         kCapacity
class LineWriter {
 public:
  // The most that one call of reserve can ask for.
  static constexpr int64_t kRoom = 4096;

  // Where to put the next `count` bytes, which belong at `to`.
  PC_FORCE_INLINE char* reserve(char* to, int64_t count) {
    if (to != line_ + end_) {
      finish();
      begin_ = end_ = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLine);
      line_ = to - begin_;
    } else if (end_ + count > kCapacity) {
      drain();
    }
    char* room = bytes_ + end_;
    end_ += count;
    return room;
  }

  // Writes what has been collected; a line that is not whole is written as far as it goes.
  PC_FORCE_INLINE void finish() {
    if (begin_ == end_) return;
    drain();
    copy_bytes(line_ + begin_, bytes_ + begin_, end_ - begin_);
    begin_ = end_;
  }

 private:
  static constexpr int64_t kCapacity = kRoom + kLine;

  // Writes the lines that are whole, and moves the rest to the front.
  inline void drain() {
    if (end_ < kLine) return;
    int64_t at = 0;
    if (begin_ > 0) {
      copy_bytes(line_ + begin_, bytes_ + begin_, kLine - begin_);
      at = kLine;
    }
    for (; at + kLine <= end_; at += kLine) stream_line(line_ + at, bytes_ + at);
    copy_bytes(bytes_, bytes_ + at, end_ - at);
    line_ += at;
    end_ -= at;
    begin_ = 0;
  }

  alignas(kLine) char bytes_[kCapacity];
  char* line_ = nullptr;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
