// Receipts and the pins that they put on nodes.
//
//   receipt ends at N, window of 40 blocks:      A [0, 60) ── T [60, 100) ── N [100, 100 + k)
//   full     pins the path A, T, N
//   window   pins the nodes of the last 40 blocks before its end, which are whole nodes: the tree splits at both ends;
//            and the nodes of its sinks, if it has any
//   state    pins N
//
// I1: path_pins of a node = receipts that end there + pinned children. A node can be evicted iff it has none.
// I2: pins of a window or state = receipts that hold it there; Part::receipts counts those that end there.
// States of a receipt: made (lock, lock_again) -> fewer components (release) -> given back, components == 0.
// The path stays pinned until the last component of a receipt is released.
// Cost: O(nodes whose pins go 0 <-> 1), since pinning a path climbs only that far; a lock also touches every node of
// the path. Nothing fails. Threads: one writer.
#pragma once

#include <cstdint>

#include "pagecore/index/radix/nodes/node_store.hpp"
#include "pagecore/index/radix/retention/eviction_queues.hpp"

namespace pagecore::radix {

struct Receipt {
  NodeId node = kNoNode;    // kNoNode: an empty prefix
  uint32_t components = 0;  // one bit each; 0: given back
  uint64_t since = 0;       // turn in which its first nodes were pinned; forks keep it
};

class Pins {
 public:
  Pins(NodeStore& nodes, EvictionQueues& queues) : nodes_(nodes), queues_(queues) {}
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

  // Receipt for the path that ends with `node`, or for an empty prefix. Nodes start where the windows start.
  [[nodiscard]] Receipt lock(NodeId node, uint32_t components, bool is_hit);
  // Uses the components of the path that ends with `node`, which may be kNoNode.
  void touch(NodeId node, uint32_t components, bool is_hit);
  // Second receipt for the prefix of another.
  [[nodiscard]] Receipt lock_again(const Receipt& receipt) noexcept;
  // Releases the given components; `hint` applies to nodes that no other receipt pins.
  void release(Receipt& receipt, uint32_t components, const RetentionHint& hint);
  // Moves the receipt down its path to `end`, which may be its own node after growing. The receipt held `old_end`
  // blocks; its pins reach down to `pinned_end`. Its state is released, the full component is held from now on.
  void move_down(Receipt& receipt, NodeId end, int64_t old_end, int64_t pinned_end);

  [[nodiscard]] int64_t num_receipts() const { return num_receipts_; }
  void check_invariants() const;

 private:
  // Calls back for each node whose ids of a component the prefix that ends with `end` needs.
  template <typename Visit>
  void for_each_needed(NodeId end, int32_t component, Visit&& visit) const {
    const int64_t first = nodes_.components().first_needed(component, nodes_.end(end));
    const int64_t sinks = first > 0 ? nodes_.components().sink_blocks(component) : 0;
    for (NodeId node = end; node >= 0 && (nodes_.end(node) > first || sinks > 0); node = nodes_.at(node).parent) {
      if (nodes_.end(node) > first || nodes_.at(node).depth < sinks) visit(node);
    }
  }
  void pin_path(NodeId node, int32_t by, const RetentionHint& hint);
  void pin(NodeId end, int32_t component, int32_t by, const RetentionHint& hint);
  void pin_node(NodeId node, int32_t component, int32_t by, const RetentionHint& hint);
  void move_window(NodeId from, NodeId end, int32_t window, int64_t old_end, int64_t pinned_end);

  NodeStore& nodes_;
  EvictionQueues& queues_;
  int64_t num_receipts_ = 0;
};

}  // namespace pagecore::radix
