#include "pagecore/index/radix/retention/pins.hpp"

#include <vector>

namespace pagecore::radix {

void Pins::pin_path(NodeId node, int32_t by, const RetentionHint& hint) {
  for (; node >= 0; node = nodes_.at(node).parent) {
    Node& it = nodes_.at(node);
    it.path_pins += by;
    if (by > 0 && it.path_pins == 1) {
      queues_.pinned(node, 0);
    } else if (by < 0 && it.path_pins == 0) {
      queues_.unpinned(node, 0, hint);
    } else {
      return;
    }
  }
}

void Pins::pin(NodeId end, int32_t component, int32_t by, const RetentionHint& hint) {
  nodes_.part(end, component).receipts += by;
  for_each_needed(end, component, [&](NodeId node) { pin_node(node, component, by, hint); });
}

void Pins::pin_node(NodeId node, int32_t component, int32_t by, const RetentionHint& hint) {
  Part& it = nodes_.part(node, component);
  it.pins += by;
  if (it.pins != (by > 0 ? 1 : 0)) return;
  if (by > 0) {
    queues_.pinned(node, component);
  } else {
    queues_.unpinned(node, component, hint);
  }
}

Receipt Pins::lock(NodeId node, uint32_t components, bool is_hit) {
  ++num_receipts_;
  if (node == kNoNode) return {kNoNode, components, queues_.turn()};
  touch(node, components, is_hit);
  for (int32_t c = 1; c < nodes_.components().count(); ++c) {
    if (has_component(components, c)) pin(node, c, 1, {});
  }
  ++nodes_.at(node).receipts;
  pin_path(node, 1, {});
  return {node, components, queues_.turn()};
}

void Pins::touch(NodeId node, uint32_t components, bool is_hit) {
  for (NodeId above = node; above >= 0; above = nodes_.at(above).parent) queues_.touch(above, 0, is_hit);
  for (int32_t c = 1; c < nodes_.components().count() && node >= 0; ++c) {
    if (has_component(components, c)) for_each_needed(node, c, [&](NodeId it) { queues_.touch(it, c, is_hit); });
  }
}

Receipt Pins::lock_again(const Receipt& receipt) noexcept {
  ++num_receipts_;
  if (receipt.node == kNoNode) return receipt;
  for (int32_t c = 1; c < nodes_.components().count(); ++c) {
    if (has_component(receipt.components, c)) pin(receipt.node, c, 1, {});
  }
  ++nodes_.at(receipt.node).receipts;
  pin_path(receipt.node, 1, {});
  return receipt;
}

void Pins::release(Receipt& receipt, uint32_t components, const RetentionHint& hint) {
  components &= receipt.components;
  receipt.components &= ~components;
  for (int32_t c = 1; c < nodes_.components().count() && receipt.node != kNoNode; ++c) {
    if (has_component(components, c)) pin(receipt.node, c, -1, hint);
  }
  if (receipt.components != 0) return;
  --num_receipts_;
  if (receipt.node == kNoNode) return;
  --nodes_.at(receipt.node).receipts;
  pin_path(receipt.node, -1, hint);
}

void Pins::move_down(Receipt& receipt, NodeId end, int64_t old_end, int64_t pinned_end) {
  const Components& all = nodes_.components();
  const NodeId old = receipt.node;
  if (old != kNoNode && (receipt.components & all.state_bit()) != 0) pin(old, all.state(), -1, {});
  receipt.components = (receipt.components & ~all.state_bit()) | 1;
  for (int32_t w = 1; w <= all.num_windows(); ++w) {
    if (has_component(receipt.components, w)) move_window(old, end, w, old_end, pinned_end);
  }
  receipt.node = end;
  if (end == old) return;
  ++nodes_.at(end).receipts;
  pin_path(end, 1, {});
  if (old == kNoNode) return;
  --nodes_.at(old).receipts;
  pin_path(old, -1, {});  // unpins nothing: the node has a pinned child now
}

// Pins the nodes that the window has reached and unpins those that it has left.
void Pins::move_window(NodeId from, NodeId end, int32_t window, int64_t old_end, int64_t pinned_end) {
  const int64_t start = nodes_.components().window_start(window, nodes_.end(end));
  const int64_t old_start = nodes_.components().window_start(window, old_end);
  const int64_t sinks = nodes_.components().sink_blocks(window);
  for (NodeId node = end; node >= 0 && (nodes_.end(node) > old_start || sinks > 0); node = nodes_.at(node).parent) {
    const bool is_sink = nodes_.at(node).depth < sinks;
    const bool was_within = old_start < old_end && nodes_.end(node) > old_start;  // a chunk can begin at old_end
    const bool was_pinned = nodes_.end(node) <= pinned_end && (was_within || is_sink);
    const bool is_within = nodes_.end(node) > start || is_sink;
    if (was_pinned != is_within) pin_node(node, window, is_within ? 1 : -1, {});
  }
  if (from != kNoNode) --nodes_.part(from, window).receipts;
  ++nodes_.part(end, window).receipts;
}

void Pins::check_invariants() const {
  const auto num_ids = static_cast<size_t>(nodes_.num_ids());
  std::vector<int32_t> pinned_children(num_ids);
  int64_t receipts = 0;
  for (NodeId node = 0; node < nodes_.num_ids(); ++node) {
    const Node& it = nodes_.at(node);
    receipts += it.receipts;
    if (it.size > 0 && it.parent >= 0) pinned_children[static_cast<size_t>(it.parent)] += it.path_pins > 0;
  }
  PC_ASSERT(receipts <= num_receipts_);  // receipts of empty prefixes end at no node
  for (NodeId node = 0; node < nodes_.num_ids(); ++node) {
    PC_ASSERT(nodes_.at(node).path_pins == nodes_.at(node).receipts + pinned_children[static_cast<size_t>(node)]);
  }
  for (int32_t c = 1; c < nodes_.components().count(); ++c) {
    std::vector<int32_t> pins(num_ids);
    for (NodeId end = 0; end < nodes_.num_ids(); ++end) {
      if (nodes_.at(end).size == 0 || nodes_.part(end, c).receipts == 0) continue;
      const int64_t first = nodes_.components().first_needed(c, nodes_.end(end));
      const int64_t sinks = nodes_.components().sink_blocks(c);
      for_each_needed(end, c, [&](NodeId node) {
        PC_ASSERT(!nodes_.components().is_window(c) || nodes_.at(node).depth >= first || nodes_.end(node) <= sinks);
        pins[static_cast<size_t>(node)] += nodes_.part(end, c).receipts;
      });
    }
    for (NodeId node = 0; node < nodes_.num_ids(); ++node) {
      if (nodes_.at(node).size == 0) continue;
      PC_ASSERT(nodes_.part(node, c).pins == pins[static_cast<size_t>(node)]);
      PC_ASSERT(nodes_.part(node, c).receipts <= nodes_.at(node).receipts);
    }
  }
}

}  // namespace pagecore::radix
