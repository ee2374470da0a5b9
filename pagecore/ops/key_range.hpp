// The range of keys that a query may attend to, for the planner, the checks and the kernels.
#pragma once

#include <cstdint>

namespace pagecore {

// Keys before and after a query's own position; -1: unbounded. Causality is right == 0. A `left` below -1 is that of
// chunked local attention (left_of_chunk): keys of earlier chunks than the query's own are not attended to. The first
// `sinks` keys are attended to as well, as a range of their own (sink_keys); attended_keys() begins after them.
struct Window {
  int64_t left = -1;
  int64_t right = -1;
  int64_t sinks = 0;
};

// The `left` of chunks of `chunk` keys, and the chunk of a `left` below -1.
[[gnu::always_inline]] inline int64_t left_of_chunk(int64_t chunk) { return -1 - chunk; }
[[gnu::always_inline]] inline int64_t chunk_of_left(int64_t left) { return -1 - left; }

struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;  // >= begin
};

[[gnu::always_inline]] inline Window make_window(bool causal, int64_t left, int64_t right, int64_t sinks = 0) {
  if (causal) right = 0;  // causality overrides a window to the right
  return {left, right, sinks};
}

// Return the keys that at least one query of positions first .. last attends to, in a sequence of `length` keys. With
// more queries than keys, positions are negative; such queries may have no keys.
//
//   first - left        first ... last        last + right
//        [===============================================]     clipped to [0, length)
//
// Chunks begin the range where the chunk of `first` begins.
[[gnu::always_inline]] inline KeyRange attended_keys(const Window& window, int64_t first, int64_t last,
                                                     int64_t length) {
  int64_t begin = window.left < 0 || first < window.left ? 0 : first - window.left;
  int64_t end = window.right < 0 || length - 1 - last < window.right ? length : last + window.right + 1;
  if (window.left < -1) [[unlikely]] {
    const int64_t chunk = chunk_of_left(window.left);
    if (first > 0) begin = first / chunk * chunk;
    const int64_t chunk_end = last < 0 ? 0 : (last / chunk + 1) * chunk;
    if (end > chunk_end) end = chunk_end;
  }
  if (begin < window.sinks) begin = window.sinks;
  if (begin > length) begin = length;
  if (end < begin) end = begin;
  return {begin, end};
}

// Return the sinks that at least one query of positions up to `last` attends to.
[[gnu::always_inline]] inline KeyRange sink_keys(const Window& window, int64_t last, int64_t length) {
  int64_t end = window.right < 0 || length - 1 - last < window.right ? length : last + window.right + 1;
  if (end > window.sinks) end = window.sinks;
  return {0, end < 0 ? 0 : end};
}

}  // namespace pagecore
