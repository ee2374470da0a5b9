// Takes ids from the tree, worst first. The caller owns the references: it frees the ids that are returned.
//
// Precondition of every call: the component has at least `amount` evictable ids, and EvictionQueues::expire() was
// called in this turn. Nothing fails while the lists have room. Cost: O(log n) a node, O(1) an id.
#pragma once

#include <cstdint>
#include <vector>

#include "pagecore/index/radix/retention/claims.hpp"
#include "pagecore/index/radix/tree/branches.hpp"
#include "pagecore/index/radix/tree/structure.hpp"
#include "pagecore/index/radix/tree/tree_journal.hpp"

namespace pagecore::radix {

class Eviction {
 public:
  Eviction(NodeStore& nodes, EvictionQueues& queues, Claims& claims, Structure& structure, Branches& branches,
           TreeJournal& journal)
      : nodes_(nodes),
        queues_(queues),
        claims_(claims),
        structure_(structure),
        branches_(branches),
        journal_(journal) {}
  Eviction(const Eviction&) = delete;
  Eviction& operator=(const Eviction&) = delete;

  // Takes `amount` ids of a component; of the full one, whole blocks from the tails of leaves, with the ids that every
  // component has there. `out` is by lane, states last. Returns the number, which is larger than `amount` if the rest
  // of a path is left empty.
  int64_t take(int32_t component, int64_t amount, std::vector<Ids>& out);
  // Removes the last `blocks` blocks of a leaf; returns the leaf, or its parent if nothing is left of it.
  NodeId take_tail(NodeId leaf, int32_t blocks, std::vector<Ids>& out);

 private:
  int64_t take_blocks(int64_t amount, std::vector<Ids>& out);
  void prefetch_next() const;
  void take_window(int32_t window, int64_t amount, Ids& out);
  void take_states(int64_t amount, Ids& out);
  // Takes the ids of every component from the last `blocks` blocks of a leaf.
  void give_up_tail(NodeId leaf, int32_t blocks, std::vector<Ids>& out);

  NodeStore& nodes_;
  EvictionQueues& queues_;
  Claims& claims_;
  Structure& structure_;
  Branches& branches_;
  TreeJournal& journal_;
};

}  // namespace pagecore::radix
