#include "pagecore/index/radix/tree/branches.hpp"

namespace pagecore::radix {

void Branches::note(NodeId node) {
  while (node >= 0 && nodes_.at(node).state == kNoState) node = nodes_.at(node).parent;
  if (node < 0) return;
  queues_.set_branch(node, true);
  pass_states(node);
}

void Branches::place_state(NodeId node, NodeId end) {
  const int32_t component = nodes_.components().state(), blocks = static_cast<int32_t>(nodes_.end(node));
  EvictionState& eviction = nodes_.part(node, component).eviction;
  eviction.is_branch = has_branch(node, end);
  eviction.after_state = eviction.after_branch = blocks;
  for (NodeId above = nodes_.at(node).parent; above >= 0; above = nodes_.at(above).parent) {
    if (nodes_.at(above).state == kNoState) continue;
    const EvictionState& before = nodes_.part(above, component).eviction;
    const int32_t since = blocks - static_cast<int32_t>(nodes_.end(above));
    if (eviction.after_state == blocks) {
      eviction.after_state = since;
      queues_.set_next(above);
      if (before.is_branch) queues_.set_branch(above, has_branch(above, nodes_.at(node).parent));
    }
    if (!before.is_branch) continue;
    eviction.after_branch = since;
    break;
  }
  if (eviction.is_branch) pass_states(node);
}

void Branches::pass_states(NodeId node) {
  for (NodeId above = nodes_.at(node).parent; above >= 0; above = nodes_.at(above).parent) {
    if (nodes_.at(above).state == kNoState) continue;
    if (!nodes_.part(above, nodes_.components().state()).eviction.is_learned()) break;
    queues_.set_passed(above);
  }
}

bool Branches::has_branch(NodeId node, NodeId end) const {
  bool found = false;
  for (NodeId below = end; below != node; below = nodes_.at(below).parent) {
    found = nodes_.at(below).state == kNoState && (found || nodes_.at(below).children > 1);
  }
  return found || nodes_.at(node).children > 1;
}

}  // namespace pagecore::radix
