// Components of a tree, and the lanes of block ids that they own.
//
//   component   0: full              1 ..: one for each window       last: state, if there are states
//   lane        0 .. full_lanes - 1  full_lanes ..: one each         num_lanes(): state ids, in lists by lane
//
// Every node has the full component: its blocks, or only tokens where full_lanes is 0. A window holds ids of its lane,
// null where they were evicted. A state is one id at the end of a node.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pagecore::radix {

// Tokens before the end of a prefix that a window needs. With chunks, they begin where the chunk of the first begins:
//
//   seen 3      end 14: tokens 11 12 13        seen 0, chunk 8      end 14: tokens 8 .. 13      end 16: none
//
// The first `sinks` tokens are needed as well. Whole nodes hold their blocks: the tree splits where the sinks end.
struct Window {
  int64_t seen;
  int64_t chunk = 0;
  int64_t sinks = 0;

  [[nodiscard]] int64_t start(int64_t end) const {
    const int64_t first = std::max<int64_t>(0, end - seen);
    return chunk > 0 ? first / chunk * chunk : first;
  }
};

struct Components {
  int64_t block_size = 16;
  int32_t full_lanes = 1;
  std::vector<Window> windows;
  bool has_states = false;
  int64_t min_kept = 0;  // blocks of a window that a node keeps while others have more than they need

  [[nodiscard]] int32_t num_windows() const { return static_cast<int32_t>(windows.size()); }
  [[nodiscard]] int32_t num_lanes() const { return full_lanes + num_windows(); }
  [[nodiscard]] int32_t count() const { return 1 + num_windows() + (has_states ? 1 : 0); }
  [[nodiscard]] uint32_t all() const { return (uint32_t{1} << count()) - 1; }

  [[nodiscard]] bool is_window(int32_t component) const { return component >= 1 && component <= num_windows(); }
  // The component of states, or -1.
  [[nodiscard]] int32_t state() const { return has_states ? num_windows() + 1 : -1; }
  [[nodiscard]] uint32_t state_bit() const { return has_states ? uint32_t{1} << state() : 0; }
  [[nodiscard]] int32_t lane_of(int32_t window) const { return full_lanes + window - 1; }
  // The component that owns a lane, or of states for num_lanes().
  [[nodiscard]] int32_t owner_of(int32_t lane) const {
    return lane == num_lanes() ? state() : lane < full_lanes ? 0 : lane - full_lanes + 1;
  }

  // A prefix of `end` blocks needs blocks [first_needed, end) and [0, sink_blocks) of a component to be reused.
  [[nodiscard]] int64_t first_needed(int32_t component, int64_t end) const {
    if (component == 0) return 0;
    return is_window(component) ? window_start(component, end) : end - 1;
  }
  // Blocks at the end of a prefix of `end` blocks that its window needs, or would need elsewhere in its chunk; at
  // least min_kept.
  [[nodiscard]] int64_t window_blocks(int32_t window, int64_t end) const {
    const int64_t chunk = windows[static_cast<size_t>(window - 1)].chunk / block_size;
    return std::min(end, std::max({end - window_start(window, end), chunk, min_kept}));
  }
  // 0 if the window begins before the end of its sinks.
  [[nodiscard]] int64_t window_start(int32_t window, int64_t end) const {
    const int64_t start = windows[static_cast<size_t>(window - 1)].start(end * block_size) / block_size;
    return start <= sink_blocks(window) ? 0 : start;
  }
  [[nodiscard]] int64_t sink_blocks(int32_t component) const {
    if (!is_window(component)) return 0;
    return (windows[static_cast<size_t>(component - 1)].sinks + block_size - 1) / block_size;
  }
  // Nodes that a receipt may split: where each window begins, and where its sinks end.
  [[nodiscard]] int64_t num_cuts() const {
    return std::ssize(windows) +
           std::count_if(windows.begin(), windows.end(), [](const Window& w) { return w.sinks > 0; });
  }
};

[[nodiscard]] inline bool has_component(uint32_t components, int32_t component) {
  return (components >> component & 1) != 0;
}

}  // namespace pagecore::radix
