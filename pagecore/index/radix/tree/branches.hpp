// States and the branches after them, which decide how much an eviction of each would cost.
//
//   S1 ── S2 ── X ── S3       a second path leaves at X: S2 precedes a branch, S1 is passed (S2 serves what it would)
//               └─── S4
//
// Marks are changed through the eviction queues, which refresh the node. Nothing fails. Cost: O(nodes above).
#pragma once

#include "pagecore/index/radix/nodes/node_store.hpp"
#include "pagecore/index/radix/retention/eviction_queues.hpp"

namespace pagecore::radix {

class Branches {
 public:
  Branches(NodeStore& nodes, EvictionQueues& queues) : nodes_(nodes), queues_(queues) {}
  Branches(const Branches&) = delete;
  Branches& operator=(const Branches&) = delete;

  // Marks the last state before a branch at the end of a node, and those before it.
  void note(NodeId node);
  // Measures a new state on the path to `end` from those before it, and marks the last of them.
  void place_state(NodeId node, NodeId end);

 private:
  // Marks the states before one that precedes a branch, back to the last that precedes another.
  void pass_states(NodeId node);
  // True if a path to `end` branches at or after a node on it, and before the next state.
  [[nodiscard]] bool has_branch(NodeId node, NodeId end) const;

  NodeStore& nodes_;
  EvictionQueues& queues_;
};

}  // namespace pagecore::radix
