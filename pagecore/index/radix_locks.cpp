// Receipts: who uses what. Pinning climbs only while a count goes 0 -> 1, unpinning while it goes 1 -> 0.
#include <limits>

#include "pagecore/index/radix_tree.hpp"

namespace pagecore {

using radix::kNoNode;

void RadixTree::touch(NodeId node, int32_t component, bool is_hit) {
  radix::EvictionState& eviction = part(node, component).eviction;
  eviction.used = turn_;
  if (is_hit && eviction.hits < std::numeric_limits<int32_t>::max()) ++eviction.hits;
}

void RadixTree::pin_path(NodeId node, int32_t by, const radix::RetentionHint* hint) {
  while (node >= 0) {
    Node& it = at(node);
    it.path_pins += by;
    const bool was_free = by > 0 && it.path_pins == 1;
    const bool is_free = by < 0 && it.path_pins == 0;
    if (!was_free && !is_free) return;
    evictable_[0] += is_free ? it.size : -it.size;
    if (is_free) {
      touch(node, 0, false);
      hint->apply(part(node, 0).eviction, now_);
    }
    refresh(node, 0);
    node = it.parent;
  }
}

// One receipt more or less holds the component at the node where it ends.
void RadixTree::pin(NodeId node, int32_t component, int32_t by, const radix::RetentionHint* hint) {
  part(node, component).receipts += by;
  const int64_t start = is_window(component) ? window_start(component, depth(node)) : depth(node) - 1;
  while (node >= 0 && depth(node) > start) {
    pin_part(node, component, by, hint);
    node = at(node).parent;
  }
}

void RadixTree::pin_part(NodeId node, int32_t component, int32_t by, const radix::RetentionHint* hint) {
  Part& it = part(node, component);
  it.pins += by;
  if (it.pins != (by > 0 ? 1 : 0)) return;
  evictable_[static_cast<size_t>(component)] += by > 0 ? -it.count : it.count;
  if (by < 0) {
    touch(node, component, false);
    hint->apply(it.eviction, now_);
  }
  refresh(node, component);
}

// A receipt for the path that ends with `node`, which reserve() has room to split.
RadixTree::Receipt RadixTree::lock_end(NodeId node, uint32_t components, bool is_hit) {
  const int64_t end = depth(node);
  for (int32_t c = 1; c <= num_windows(); ++c) {
    const int64_t start = window_start(c, end);
    if (start > 0 && (components >> c & 1) != 0) static_cast<void>(split_path(node, start));
  }
  for (NodeId above = node; above >= 0; above = at(above).parent) touch(above, 0, is_hit);
  for (int32_t c = 1; c < num_components_; ++c) {
    if ((components >> c & 1) == 0) continue;
    const int64_t start = is_window(c) ? window_start(c, end) : end - 1;
    for (NodeId above = node; above >= 0 && depth(above) > start; above = at(above).parent) touch(above, c, is_hit);
    pin(node, c, 1, nullptr);
  }
  ++at(node).receipts;
  pin_path(node, 1, nullptr);
  ++num_receipts_;
  return {node, components};
}

RadixTree::Receipt RadixTree::lock(Match& match, uint32_t components) {
  if (match.node != kNoNode) reserve(1 + num_windows());
  ++turn_;
  if (match.node == kNoNode) {
    ++num_receipts_;
    return {kNoNode, components};
  }
  while (at(match.node).depth >= match.blocks) match.node = at(match.node).parent;  // another lock has split it
  match.offset = static_cast<int32_t>(match.blocks - at(match.node).depth);
  const NodeId found = match.node;
  if (match.offset < at(match.node).size) match.node = split(match.node, match.offset);
  if (has_states_ && at(match.node).state == radix::kNoState) components &= ~(1u << state_component());
  const Receipt receipt = lock_end(match.node, components, true);
  match.offset = at(match.node).size;  // a window may have begun within the node, which is split there then
  prune(found);                        // the lower half, if there is one
  return receipt;
}

RadixTree::Receipt RadixTree::lock_again(const Receipt& receipt) {
  for (int32_t c = 1; c < num_components_ && receipt.node != kNoNode; ++c) {
    if ((receipt.components >> c & 1) != 0) pin(receipt.node, c, 1, nullptr);
  }
  if (receipt.node != kNoNode) {
    ++at(receipt.node).receipts;
    pin_path(receipt.node, 1, nullptr);
  }
  ++num_receipts_;
  return receipt;
}

void RadixTree::unlock(Receipt& receipt, uint32_t components, const radix::RetentionHint& hint) {
  ++turn_;
  drop(receipt, components, hint);
  prune(receipt.node);
  if (receipt.components == 0) receipt.node = kNoNode;  // nothing keeps it: nobody may ask for its depth
}

// The path stays pinned until the last component is given back.
void RadixTree::drop(Receipt& receipt, uint32_t components, const radix::RetentionHint& hint) {
  components &= receipt.components;
  receipt.components &= ~components;
  if (receipt.node != kNoNode) {
    for (int32_t c = 1; c < num_components_; ++c) {
      if ((components >> c & 1) != 0) pin(receipt.node, c, -1, &hint);
    }
  }
  if (receipt.components != 0) return;
  --num_receipts_;
  if (receipt.node == kNoNode) return;
  --at(receipt.node).receipts;
  pin_path(receipt.node, -1, &hint);
}

}  // namespace pagecore
