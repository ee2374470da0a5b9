// Nodes come, split and go. Nothing here fails after reserve().
#include <algorithm>

#include "pagecore/index/radix_tree.hpp"

namespace pagecore {

using radix::kNoNode;
using radix::kNoState;

void RadixTree::link_after(NodeId node, NodeId previous, radix::RunId run) {
  NodeId& next = previous == kNoNode ? runs_[run].first : at(previous).next;
  at(node).previous = previous;
  at(node).next = next;
  if (next != kNoNode) at(next).previous = node;
  next = node;
}

void RadixTree::unlink(NodeId node) {
  const Node& it = at(node);
  (it.previous == kNoNode ? runs_[it.run].first : at(it.previous).next) = it.next;
  if (it.next != kNoNode) at(it.next).previous = it.previous;
}

radix::NodeId RadixTree::add_leaf(NodeId parent, const radix::Query& query, int64_t first, radix::Run&& run) {
  const NodeId node = take_node();
  Node& it = at(node);
  it = Node{};
  it.parent = parent;
  it.size = run.live;
  it.depth = static_cast<int32_t>(first);
  it.run = runs_.add(std::move(run));
  it.hash = hash_(parent, runs_.tokens(it.run, 0), block_size_, query.marks, first);
  link_after(node, kNoNode, it.run);
  map_.add(it.hash, node);
  for (int32_t c = 0; c < num_components_; ++c) {
    part(node, c) = Part{};
    part(node, c).eviction.used = part(node, c).eviction.made = turn_;
  }
  ++(parent < 0 ? space_children_[static_cast<size_t>(-1 - parent)] : at(parent).children);
  change_count(node, 0, it.size);
  if (parent >= 0) refresh(parent, 0);
  return node;
}

// The leading `blocks` become a node of their own, which is returned; the rest keeps the id.
radix::NodeId RadixTree::split(NodeId node, int32_t blocks) {
  const NodeId top = take_node();
  Node& upper = at(top);
  Node& lower = at(node);
  upper = lower;
  upper.size = blocks;
  upper.children = 1;
  upper.receipts = 0;
  upper.path_pins = lower.path_pins > 0 ? 1 : 0;
  upper.state = kNoState;
  lower.parent = top;
  lower.start += blocks;
  lower.size -= blocks;
  lower.depth += blocks;
  link_after(top, lower.previous, lower.run);
  map_.replace(lower.hash, node, top);
  lower.hash = hash_(top, runs_.tokens(lower.run, lower.start), block_size_, runs_[lower.run].marks, lower.start);
  map_.add(lower.hash, node);
  for (int32_t c = 0; c < num_components_; ++c) {
    Part& low = part(node, c);
    Part& high = part(top, c);
    high = low;
    high.receipts = high.first = 0;
    if (c == 0) {
      high.count = blocks;
    } else if (is_window(c)) {
      high.count = low.count == blocks + lower.size ? blocks
                   : low.count == 0
                       ? 0
                       : static_cast<int32_t>(
                             blocks - std::count(lane(top, lane_of(c)), lane(top, lane_of(c)) + blocks, kNullBlock));
    } else {
      high.count = high.pins = 0;
    }
    low.count -= high.count;
    low.first = 0;
  }
  refresh_all(node);
  refresh_all(top);
  return top;
}

// The node on the path to the root that ends after `depth` blocks; makes one where none does. depth > 0.
radix::NodeId RadixTree::split_path(NodeId node, int64_t depth) {
  while (at(node).depth >= depth) node = at(node).parent;
  const int64_t blocks = depth - at(node).depth;
  return blocks == at(node).size ? node : split(node, static_cast<int32_t>(blocks));
}

// It has no children, pins, ids or state any more; only its tokens are left.
void RadixTree::remove_leaf(NodeId node) {
  const Node it = at(node);
  for (int32_t c = 0; c < num_components_; ++c) {
    heaps_[static_cast<size_t>(c)].erase(node);
    if (policy_ == radix::Policy::Priority) expiries_[static_cast<size_t>(c)].erase(node);
  }
  map_.erase(it.hash, node);
  unlink(node);
  radix::Run& run = runs_[it.run];
  run.live -= it.size;
  free_node(node);
  compact(it.run);
  if (it.parent >= 0) {
    --at(it.parent).children;
    refresh(it.parent, 0);
  } else {
    --space_children_[static_cast<size_t>(-1 - it.parent)];
    drop_namespace_if_empty(-1 - it.parent);
  }
}

// A leaf loses its last blocks, whose ids are gone already.
void RadixTree::trim(NodeId node, int32_t blocks) {
  at(node).size -= blocks;
  for (int32_t w = 1; w <= num_windows(); ++w) part(node, w).first = std::min(part(node, w).first, at(node).size);
  runs_[at(node).run].live -= blocks;
  compact(at(node).run);
}

// Whether nothing keeps the node, in a tree whose full component holds no blocks.
bool RadixTree::is_empty(NodeId node) const {
  if (full_lanes_ > 0 || at(node).children > 0 || at(node).path_pins > 0) return false;
  for (int32_t c = 1; c < num_components_; ++c) {
    if (part(node, c).count > 0) return false;
  }
  return true;
}

// Removes the node if it is empty, and its parents that become so; returns how many blocks of tokens went.
int64_t RadixTree::prune(NodeId node) {
  int64_t gone = 0;
  while (node >= 0 && at(node).size > 0 && is_empty(node)) {
    const NodeId parent = at(node).parent;
    gone += at(node).size;
    change_count(node, 0, -at(node).size);
    remove_leaf(node);
    node = parent;
  }
  return gone;
}

// What the node holds of a component changes; sizes and heaps follow.
void RadixTree::change_count(NodeId node, int32_t component, int32_t by) {
  part(node, component).count += by;
  held_[static_cast<size_t>(component)] += by;
  if (!is_pinned(node, component)) evictable_[static_cast<size_t>(component)] += by;
  refresh(node, component);
}

// Puts the node into the component's heap, moves it there, or takes it out.
void RadixTree::refresh(NodeId node, int32_t component) {
  radix::NodeHeap& heap = heaps_[static_cast<size_t>(component)];
  radix::NodeHeap& expiries = expiries_[static_cast<size_t>(component)];
  const Part& it = part(node, component);
  const bool can_go = it.count > 0 && !is_pinned(node, component) && (component != 0 || at(node).children == 0);
  if (!can_go) {
    heap.erase(node);
    if (policy_ == radix::Policy::Priority) expiries.erase(node);
    return;
  }
  heap.put(node, key_of(policy_, it.eviction, at(node).depth));
  if (policy_ != radix::Policy::Priority) return;
  if (it.eviction.expiry < radix::kNever) {
    expiries.put(node, {it.eviction.expiry, 0, 0});
  } else {
    expiries.erase(node);
  }
}

void RadixTree::refresh_all(NodeId node) {
  for (int32_t c = 0; c < num_components_; ++c) refresh(node, c);
}

}  // namespace pagecore
