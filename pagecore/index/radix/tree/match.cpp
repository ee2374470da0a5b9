// Lookup of prefixes.
#include <algorithm>
#include <array>

#include "pagecore/index/radix/tree/tree.hpp"

namespace pagecore {

using radix::kNoNode;
using radix::kNoState;
using radix::NodeId;
using radix::NodeStore;

namespace {

// The longest prefix of a path that every component can reuse.
//
//   window of 3 blocks   ids . . 7 8 9 . 4     runs 0 0 1 2 3 0 1     reusable after block 5, whose run is >= 3
//   chunks of 2 blocks   ids . . . 8 . . 4     runs 0 0 0 1 0 0 1     reusable after blocks 2, 4, 6, which need none,
//   and 7
//
// A prefix of fewer blocks than the window needs a run over all of its blocks.
class Reuse {
 public:
  explicit Reuse(const NodeStore& nodes) : nodes_(nodes), components_(nodes.components()) {
    std::fill_n(runs_.begin(), components_.num_windows(), 0);
    std::fill_n(leading_.begin(), components_.num_windows(), 0);
  }

  // Components whose blocks past the reusable prefix can be shared; call it after the last append().
  [[nodiscard]] uint32_t ahead(const RadixTree::Match& match) const {
    uint32_t found = 1;
    for (int32_t w = 1; w <= components_.num_windows(); ++w) {
      const bool has_all = runs_[static_cast<size_t>(w - 1)] >= match.full_blocks - match.blocks;
      if (has_all && components_.window_start(w, match.full_blocks) <= match.blocks) found |= uint32_t{1} << w;
    }
    return found;
  }
  // Appends the leading `blocks` of `node` to the path.
  void append(NodeId node, int32_t blocks, RadixTree::Match& match) {
    const radix::Node& it = nodes_.at(node);
    if (components_.has_states) {
      count_windows(node, blocks, false, match);
      if (blocks != it.size || it.state == kNoState || !is_whole(it.depth + blocks)) return;
      settle(node, blocks, match);
      match.state = it.state;
    } else if (components_.num_windows() == 0) {
      settle(node, blocks, match);
    } else {
      count_windows(node, blocks, true, match);
    }
  }

 private:
  // True if every window has the blocks that a prefix of `end` blocks needs.
  [[nodiscard]] bool is_whole(int64_t end) const {
    for (int32_t w = 1; w <= components_.num_windows(); ++w) {
      const int64_t start = components_.window_start(w, end);
      if (runs_[static_cast<size_t>(w - 1)] < end - start) return false;
      if (start > 0 && leading_[static_cast<size_t>(w - 1)] < components_.sink_blocks(w)) return false;
    }
    return true;
  }
  void settle(NodeId node, int32_t blocks, RadixTree::Match& match) const {
    match.blocks = nodes_.at(node).depth + blocks;
    match.node = node;
    match.offset = blocks;
  }

  // Updates the run of every window; if the prefix may end at any block, settles on the last that is whole.
  void count_windows(NodeId node, int32_t blocks, bool may_end, RadixTree::Match& match) {
    const radix::Node& it = nodes_.at(node);
    // Each window has all blocks of the node, or none: only the end can be the last whole block. Chunks can also begin
    // where they have no blocks.
    bool is_uniform = true;
    for (int32_t w = 1; w <= components_.num_windows(); ++w) {
      const int32_t count = nodes_.part(node, w).count;
      const bool has_chunks = components_.windows[static_cast<size_t>(w - 1)].chunk > 0;
      is_uniform = is_uniform && (count == it.size || (count == 0 && !has_chunks));
    }
    if (is_uniform || !may_end) {
      for (int32_t w = 1; w <= components_.num_windows(); ++w) count_window(node, w, 0, blocks);
      if (may_end && is_whole(it.depth + blocks)) settle(node, blocks, match);
      return;
    }
    for (int32_t i = 0; i < blocks; ++i) {
      for (int32_t w = 1; w <= components_.num_windows(); ++w) count_window(node, w, i, i + 1);
      if (is_whole(int64_t{it.depth} + i + 1)) settle(node, i + 1, match);
    }
  }

  void count_window(NodeId node, int32_t window, int32_t first, int32_t last) {
    int64_t& run = runs_[static_cast<size_t>(window - 1)];
    int64_t& leading = leading_[static_cast<size_t>(window - 1)];
    const int64_t depth = nodes_.at(node).depth;
    if (nodes_.part(node, window).count == nodes_.at(node).size) {
      run += last - first;
      if (leading == depth + first) leading += last - first;
      return;
    }
    const int32_t* const ids = nodes_.lane(node, components_.lane_of(window));
    for (int32_t i = first; i < last; ++i) {
      run = ids[i] == kNullBlock ? 0 : run + 1;
      if (ids[i] != kNullBlock && leading == depth + i) ++leading;
    }
  }

  const NodeStore& nodes_;
  const radix::Components& components_;
  std::array<int64_t, 16> runs_;     // by window: blocks in a row that it has at the end of the path
  std::array<int64_t, 16> leading_;  // by window: blocks in a row that it has at the begin of the path
};

}  // namespace

RadixTree::Match RadixTree::match(const radix::Query& query, int64_t limit) const {
  Match match;
  if (query.space < 0) return match;
  Reuse reuse(nodes_);
  NodeId parent = radix::top_of(query.space);
  while (match.full_blocks < limit) {
    const NodeId child = nodes_.find_child(parent, query, match.full_blocks);
    if (child == kNoNode) break;
    const int32_t blocks = nodes_.common_blocks(child, query, match.full_blocks, limit);
    reuse.append(child, blocks, match);
    match.full_blocks += blocks;
    match.full_node = child;
    match.full_offset = blocks;
    if (blocks < nodes_.at(child).size) break;
    parent = child;
  }
  if (components_.has_states) {
    const int64_t tokens = match.full_blocks * components_.block_size;
    const int64_t checkpoint = tokens / state_interval_ * state_interval_;
    if (checkpoint > match.blocks * components_.block_size) match.checkpoint = checkpoint;
  }
  if (components_.has_states && components_.num_windows() == 0 && components_.full_lanes > 0) {
    match.shared_blocks = match.full_blocks;
    match.shared_node = match.full_node;
    match.shared_offset = match.full_offset;
  } else {
    match.shared_blocks = match.blocks;
    match.shared_node = match.node;
    match.shared_offset = match.offset;
    if (components_.has_states && components_.full_lanes > 0) match.ahead = reuse.ahead(match);
  }
  return match;
}

void RadixTree::copy_ahead(const Match& match, int32_t lane, std::span<int32_t> out) const {
  PC_ASSERT(static_cast<int64_t>(out.size()) == match.full_blocks);
  if (match.blocks > 0) copy_blocks(match.node, match.offset, lane, out.first(static_cast<size_t>(match.blocks)));
  NodeId node = match.full_node;
  int32_t size = match.full_offset;
  for (int64_t end = match.full_blocks; end > match.blocks; end -= size) {
    if (end < match.full_blocks) size = nodes_.at(node = nodes_.at(node).parent).size;
    const int64_t start = std::max(match.blocks, end - size);
    std::copy_n(nodes_.lane(node, lane) + size - (end - start), end - start, out.begin() + start);
  }
}

void RadixTree::copy_blocks(NodeId node, int32_t offset, int32_t lane, std::span<int32_t> out) const {
  auto end = static_cast<int64_t>(out.size());
  const int64_t first = components_.first_needed(components_.owner_of(lane), end);
  std::fill_n(out.begin(), first, kNullBlock);
  int32_t size = offset;
  while (end > first) {
    const int64_t start = std::max(first, end - size);
    std::copy_n(nodes_.lane(node, lane) + size - (end - start), end - start, out.begin() + start);
    end -= size;
    if (end > first) size = nodes_.at(node = nodes_.at(node).parent).size;
  }
  if (first == 0) return;
  // The node in which the window begins can begin with the sinks.
  const int64_t sinks = components_.sink_blocks(components_.owner_of(lane));
  for (; sinks > 0 && node >= 0; node = nodes_.at(node).parent) {
    const int64_t depth = nodes_.at(node).depth, count = std::min<int64_t>(nodes_.at(node).size, sinks - depth);
    if (count > 0) std::copy_n(nodes_.lane(node, lane), count, out.begin() + depth);
  }
}

}  // namespace pagecore
