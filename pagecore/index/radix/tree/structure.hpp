// Changes of the tree's shape: nodes are split, and empty ones removed.
//
// Each keeps the eviction queues and namespaces in step. Nothing fails once memory is reserved for the nodes that
// split() makes. Cost: O(nodes of the path that are passed). Threads: one writer.
#pragma once

#include <cstdint>

#include "pagecore/index/radix/nodes/namespaces.hpp"
#include "pagecore/index/radix/nodes/node_store.hpp"
#include "pagecore/index/radix/retention/eviction_queues.hpp"

namespace pagecore::radix {

class Structure {
 public:
  Structure(NodeStore& nodes, EvictionQueues& queues, Namespaces& namespaces)
      : nodes_(nodes), queues_(queues), namespaces_(namespaces) {}
  Structure(const Structure&) = delete;
  Structure& operator=(const Structure&) = delete;

  // Splits a node after `blocks` blocks; returns the upper half, the lower one keeps the id.
  NodeId split(NodeId node, int32_t blocks);
  // Returns the node of a path that ends after `blocks` > 0 blocks; splits a node if none does.
  NodeId split_path(NodeId node, int64_t blocks);
  // Splits a path where a window begins and where its sinks end.
  void split_window(NodeId end, int32_t window);
  void remove_leaf(NodeId leaf);
  // Removes the node if it is empty, and then each parent that becomes empty; returns the number of blocks.
  int64_t prune(NodeId node);

 private:
  NodeStore& nodes_;
  EvictionQueues& queues_;
  Namespaces& namespaces_;
};

}  // namespace pagecore::radix
