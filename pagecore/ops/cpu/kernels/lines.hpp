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

// Bytes `begin` to `end` of a line; the others are neither read nor written.
PC_FORCE_INLINE void copy_line_part(char* to, const char* from, int64_t begin, int64_t end) {
#if defined(__AVX512BW__)
  const __mmask64 part = ~__mmask64{0} << begin & ~__mmask64{0} >> (kLine - end);
  _mm512_mask_storeu_epi8(to, part, _mm512_maskz_loadu_epi8(part, from));
#else
  copy_bytes(to + begin, from + begin, end - begin);
#endif
}

// Asks for a line that will be read or written soon; any address will do. (For writing too as if to be read: prefetchw
// takes a third longer on Zen 4. And never from a lambda: GCC 12 drops a function of its own that does nothing but
// ask.)
PC_FORCE_INLINE void fetch_line(const char* p) { __builtin_prefetch(p, 0, 2); }

PC_FORCE_INLINE void fetch(const char* p, int64_t count) {
  for (int64_t i = 0; i < count; i += kLine) fetch_line(p + i);
}

// Calls move(to, from) for each of the `count / kLine` lines, and asks for one in `kAsk` bytes of those
// at `next`: for reading two of four do, since caches fetch lines in pairs; for writing it takes all.
template <int64_t kAsk, typename MoveLine>
PC_FORCE_INLINE void move_lines(char* to, const char* from, int64_t count, const char* next, MoveLine&& move) {
  int64_t i = 0;
  for (; i + 4 * kLine <= count; i += 4 * kLine) {
#pragma GCC unroll 4
    for (int64_t line = 0; line < 4 * kLine; line += kAsk) fetch_line(next + i + line);
#pragma GCC unroll 4
    for (int64_t line = 0; line < 4 * kLine; line += kLine) move(to + i + line, from + i + line);
  }
  for (; i + kLine <= count; i += kLine) {
    fetch_line(next + i);
    move(to + i, from + i);
  }
}

// `count` is a multiple of kLine; every line of `to` is written by one store, so that none is cut in two.
template <int64_t kAsk>
PC_FORCE_INLINE void copy_lines(char* to, const char* from, int64_t count, const char* next) {
#if defined(__AVX512BW__)
  const auto shift = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLine);
  if (shift != 0) {
    fetch_line(next);
    if (kAsk == kLine) fetch_line(next + count - 1);
    to -= shift, from -= shift;
    copy_line_part(to, from, shift, kLine);
    move_lines<kAsk>(to + kLine, from + kLine, count - kLine, next + kLine, copy_line);
    copy_line_part(to + count, from + count, 0, shift);
    return;
  }
#endif
  move_lines<kAsk>(to, from, count, next, copy_line);
}

template <int64_t kAsk>
PC_FORCE_INLINE void copy_row(char* to, const char* from, int64_t bytes, const char* next) {
  const int64_t rest = bytes % kLine;
  if (bytes > rest) copy_lines<kAsk>(to, from, bytes - rest, next);
  copy_bytes(to + bytes - rest, from + bytes - rest, rest);
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
//   buffer  [ one line | . . . . begin === === === end . . . . . . . . .]
//            dropped    ^ bytes: belongs at `line`, the start of a line
class LineWriter {
 public:
  // The most that one call of reserve can ask for.
  static constexpr int64_t kRoom = 4096;

  // The next `count` bytes, which belong at `to`: the lines that they fill go straight on, what is left of them waits.
  // Lines `ahead` of those at `from` are asked for.
  PC_FORCE_INLINE void write(char* to, const char* from, int64_t count, int64_t ahead) {
    if (to != line_ + end_) start(to);
    if (end_ >= kLine) drain();
    if (count < kLine) {
      fetch_line(from + ahead);
      copy_bytes(bytes_ + end_, from, count);
      end_ += count;
      return;
    }
    if (end_ > 0) {
      const int64_t missing = kLine - end_;
      fetch_line(from + ahead);
      fill_first_line(from);
      write_first_line();
      from += missing;
      count -= missing;
    }
    move_lines<kLine>(line_, from, count, from + ahead, stream_line);
    end_ = count % kLine;
    line_ += count - end_;
    if (end_ > 0) keep_rest(from + count - end_);
  }

  // Where to put the next `count` bytes, which belong at `to`.
  PC_FORCE_INLINE char* reserve(char* to, int64_t count) {
    if (to != line_ + end_) {
      start(to);
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
    if (begin_ < end_) copy_line_part(line_, bytes_, begin_, end_);
    begin_ = end_;
  }

 private:
  static constexpr int64_t kCapacity = kRoom + kLine;

  PC_FORCE_INLINE void start(char* to) {
    finish();
    begin_ = end_ = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLine);
    line_ = to - begin_;
  }

  // Puts the `end_` bytes at `from`, the last of a row of a line or more, at the front.
  PC_FORCE_INLINE void keep_rest(const char* from) {
#if defined(__AVX512BW__)
    _mm512_store_si512(bytes_, _mm512_maskz_loadu_epi8(~__mmask64{0} >> (kLine - end_), from));
#else
    // A whole line that ends where the row does, because nothing may be read behind it; its front is dropped.
    copy_line(bytes_ + end_ - kLine, from + end_ - kLine);
#endif
  }

  // Adds what the line at the front lacks. (Where a store of a whole line made its front and another makes it whole,
  // the next load of it need not wait for both to have reached the cache.)
  PC_FORCE_INLINE void fill_first_line(const char* from) {
#if defined(__AVX512BW__)
    const __mmask64 lacks = ~__mmask64{0} << end_;
    _mm512_store_si512(bytes_, _mm512_mask_loadu_epi8(_mm512_load_si512(bytes_), lacks, from - end_));
#else
    copy_line(bytes_ + end_, from);
#endif
  }

  // Writes the line at the front, whose last byte is there; its first ones need not be ours.
  PC_FORCE_INLINE void write_first_line() {
    if (begin_ > 0) {
      copy_line_part(line_, bytes_, begin_, kLine);
    } else {
      stream_line(line_, bytes_);
    }
    line_ += kLine;
    begin_ = 0;
  }

  // Writes the lines that are whole, and moves the rest to the front.
  inline void drain() {
    if (end_ < kLine) return;
    write_first_line();
    int64_t at = kLine;
    for (; at + kLine <= end_; at += kLine, line_ += kLine) stream_line(line_, bytes_ + at);
    end_ -= at;
    copy_bytes(bytes_, bytes_ + at, end_);
  }

  alignas(kLine) char buffer_[kLine + kCapacity];
  char* const bytes_ = buffer_ + kLine;
  char* line_ = nullptr;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
