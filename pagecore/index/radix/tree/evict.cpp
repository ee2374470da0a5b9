// Evictions: an amount of a component, the end of a path, or a namespace.
#include <algorithm>

#include "pagecore/index/radix/tree/tree.hpp"

namespace pagecore {

int64_t RadixTree::evict(int32_t component, int64_t amount, std::vector<Ids>& out, double time) {
  amount = std::min(amount, evictable(component));
  out.resize(static_cast<size_t>(num_lanes()) + 1);
  for (Ids& ids : out) ids.clear();
  for (int32_t i = 0; i <= num_lanes(); ++i) {
    const int32_t owner = components_.owner_of(i);
    if (owner < 0 || (component != 0 && owner != component)) continue;
    out[static_cast<size_t>(i)].reserve(static_cast<size_t>(std::min(amount, held(owner))));
  }
  advance(time);
  if (amount <= 0) return 0;
  queues_.expire();
  const int64_t evicted = eviction_.take(component, amount, out);
  shrink();
  return evicted;
}

int64_t RadixTree::evict_path(const radix::Query& query, int64_t limit, int64_t keep, std::vector<Ids>& out) {
  const Match found = match(query, limit);
  const int64_t most = std::max<int64_t>(0, found.full_blocks - keep);
  out.resize(static_cast<size_t>(num_lanes()) + 1);
  for (Ids& ids : out) ids.clear();
  for (Ids& ids : out) ids.reserve(static_cast<size_t>(most));
  NodeId node = found.full_node;
  if (most == 0 || found.full_offset < nodes_.at(node).size) return 0;  // the node goes on
  int64_t evicted = 0;
  while (node >= 0 && nodes_.end(node) > keep && nodes_.at(node).children == 0 && nodes_.at(node).path_pins == 0) {
    const NodeId parent = nodes_.at(node).parent;
    const auto blocks = static_cast<int32_t>(std::min<int64_t>(nodes_.at(node).size, nodes_.end(node) - keep));
    evicted += blocks;
    node = eviction_.take_tail(node, blocks, out);
    if (node != parent) break;
  }
  structure_.prune(node);
  shrink();
  return evicted;
}

int64_t RadixTree::evict_namespace(radix::NamespaceId space, std::vector<Ids>& out) {
  std::vector<NodeId> nodes;  // of the namespace, parents before their children
  std::vector<uint8_t> is_in(static_cast<size_t>(nodes_.num_ids()));
  int64_t most = 0;
  for (const NodeId node : nodes_.by_depth()) {
    const NodeId parent = nodes_.at(node).parent;
    if (parent < 0 ? radix::namespace_of(parent) != space : is_in[static_cast<size_t>(parent)] == 0) continue;
    is_in[static_cast<size_t>(node)] = 1;
    nodes.push_back(node);
    most += nodes_.at(node).size;
  }
  out.resize(static_cast<size_t>(num_lanes()) + 1);
  for (Ids& ids : out) ids.clear();
  for (Ids& ids : out) ids.reserve(static_cast<size_t>(most));
  int64_t evicted = 0;
  while (!nodes.empty()) {
    const NodeId node = nodes.back();
    nodes.pop_back();
    if (nodes_.at(node).children > 0 || nodes_.at(node).path_pins > 0) continue;
    evicted += nodes_.at(node).size;
    static_cast<void>(eviction_.take_tail(node, nodes_.at(node).size, out));
  }
  shrink();
  return evicted;
}

radix::NodeId RadixTree::next_victim(int32_t component) {
  queues_.expire();
  if (evictable(component) <= 0) return radix::kNoNode;
  return queues_.worst(component);
}

// Returns memory that the tree no longer needs, now and then.
void RadixTree::shrink() noexcept {
  if (!nodes_.shrink()) return;
  queues_.shrink(nodes_.capacity());
  claims_.shrink();
  path_ = {};
}

}  // namespace pagecore
