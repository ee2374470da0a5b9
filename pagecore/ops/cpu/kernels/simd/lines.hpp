// Copies by whole cache lines, with streaming stores that bypass the caches: lines that are written once and not read
// soon are not read before the write and evict nothing.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/vec.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr int64_t kLine = 64;

PC_FORCE_INLINE void copy_bytes(char* to, const char* from, int64_t count) {
  __builtin_memcpy(to, from, static_cast<size_t>(count));
}

// `to` is line-aligned.
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

// Copies one line to any address.
PC_FORCE_INLINE void copy_line(char* to, const char* from) {
#pragma GCC unroll 4
  for (size_t i = 0; i < kLine; i += sizeof(Vec)) {
    store(reinterpret_cast<float*>(to + i), load(reinterpret_cast<const float*>(from + i)));
  }
}

// Copies bytes [begin, end) of a line; the others are neither read nor written.
PC_FORCE_INLINE void copy_line_part(char* to, const char* from, int64_t begin, int64_t end) {
#if defined(__AVX512BW__)
  const __mmask64 part = ~__mmask64{0} << begin & ~__mmask64{0} >> (kLine - end);
  _mm512_mask_storeu_epi8(to, part, _mm512_maskz_loadu_epi8(part, from));
#else
  copy_bytes(to + begin, from + begin, end - begin);
#endif
}

// Prefetches a line that will be read or written soon; any address is allowed. Lines to be written are prefetched for
// reading too, because prefetchw takes a third longer on Zen 4. Do not call this from a lambda: GCC 12 drops an
// out-of-line function that only prefetches.
PC_FORCE_INLINE void prefetch_line(const char* p) { __builtin_prefetch(p, 0, 2); }

// The same into the first cache. Zen 5 drops fewer of these, so they suit work that is about as fast as memory.
PC_FORCE_INLINE void prefetch_line_near(const char* p) { __builtin_prefetch(p, 0, 3); }

PC_FORCE_INLINE void prefetch_bytes(const char* p, int64_t count) {
  for (int64_t i = 0; i < count; i += kLine) prefetch_line(p + i);
}

// Calls move(to, from) for each of the `count / kLine` lines, and prefetches one line in kAsk bytes of those at `next`.
// Reads need only half of them, since caches fetch lines in pairs; writes need all.
template <int64_t kAsk, typename MoveLine>
PC_FORCE_INLINE void move_lines(char* to, const char* from, int64_t count, const char* next, MoveLine&& move) {
  int64_t i = 0;
  for (; i + 4 * kLine <= count; i += 4 * kLine) {
#pragma GCC unroll 4
    for (int64_t line = 0; line < 4 * kLine; line += kAsk) prefetch_line(next + i + line);
#pragma GCC unroll 4
    for (int64_t line = 0; line < 4 * kLine; line += kLine) move(to + i + line, from + i + line);
  }
  for (; i + kLine <= count; i += kLine) {
    prefetch_line(next + i);
    move(to + i, from + i);
  }
}

// `count` is a multiple of kLine. Each line of `to` is written by a single store.
template <int64_t kAsk>
PC_FORCE_INLINE void copy_lines(char* to, const char* from, int64_t count, const char* next) {
#if defined(__AVX512BW__)
  const auto shift = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLine);
  if (shift != 0) {
    prefetch_line(next);
    if (kAsk == kLine) prefetch_line(next + count - 1);
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

// Orders the streaming stores before all later stores of this thread.
PC_FORCE_INLINE void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Collects bytes for consecutive target addresses into whole lines, from sources of any address and length.
//
//   buffer  [ one line | . . . . begin === === === end . . . . . . . . .]
//            scratch    ^ bytes_: its target is `line_`, the start of a line
class LineWriter {
 public:
  // The maximum size of one reserve() call.
  static constexpr int64_t kRoom = 4096;

  // Appends `count` bytes whose target is `to`. Whole lines are written at once, and the remainder stays buffered.
  // Prefetches the source `ahead` bytes further on.
  PC_FORCE_INLINE void write(char* to, const char* from, int64_t count, int64_t ahead) {
    if (to != line_ + end_) start(to);
    if (end_ >= kLine) drain();
    if (count < kLine) {
      prefetch_line(from + ahead);
      copy_bytes(bytes_ + end_, from, count);
      end_ += count;
      return;
    }
    if (end_ > 0) {
      const int64_t missing = kLine - end_;
      prefetch_line(from + ahead);
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

  // Returns where the caller must put the next `count` bytes, whose target is `to`.
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

  // Writes all buffered bytes, including a partial last line.
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

  // Moves the `end_` bytes at `from`, the end of a row of at least a line, to the front.
  PC_FORCE_INLINE void keep_rest(const char* from) {
#if defined(__AVX512BW__)
    _mm512_store_si512(bytes_, _mm512_maskz_loadu_epi8(~__mmask64{0} >> (kLine - end_), from));
#else
    // Copies the whole line that ends with the row, because bytes past the row must not be read.
    copy_line(bytes_ + end_ - kLine, from + end_ - kLine);
#endif
  }

  // Completes the line at the front from `from`. One masked load and one aligned store let the next load of the line
  // proceed by store forwarding.
  PC_FORCE_INLINE void fill_first_line(const char* from) {
#if defined(__AVX512BW__)
    const __mmask64 lacks = ~__mmask64{0} << end_;
    _mm512_store_si512(bytes_, _mm512_mask_loadu_epi8(_mm512_load_si512(bytes_), lacks, from - end_));
#else
    copy_line(bytes_ + end_, from);
#endif
  }

  // Writes the line at the front, which is complete from begin_ on.
  PC_FORCE_INLINE void write_first_line() {
    if (begin_ > 0) {
      copy_line_part(line_, bytes_, begin_, kLine);
    } else {
      stream_line(line_, bytes_);
    }
    line_ += kLine;
    begin_ = 0;
  }

  // Writes the complete lines and moves the remainder to the front.
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
