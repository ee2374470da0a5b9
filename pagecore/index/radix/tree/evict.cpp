// Evictions: an amount of a component, the end of a path, what continues a prefix, or a namespace.
#include <algorithm>

#include "pagecore/index/radix/tree/tree.hpp"

namespace pagecore {

using radix::kNoNode;

namespace {

using radix::Ids;
using radix::NodeId;

struct Subtree {
  std::vector<uint8_t> is_in;  // by node
  std::vector<NodeId> nodes;   // parents before their children
};

// The nodes for which `is_top` is true, and all nodes below them.
template <typename IsTop>
Subtree list_subtree(const radix::NodeStore& nodes, IsTop&& is_top) {
  Subtree subtree{std::vector<uint8_t>(static_cast<size_t>(nodes.num_ids())), {}};
  for (const NodeId node : nodes.by_depth()) {
    const NodeId parent = nodes.at(node).parent;
    if (!is_top(node) && (parent < 0 || subtree.is_in[static_cast<size_t>(parent)] == 0)) continue;
    subtree.is_in[static_cast<size_t>(node)] = 1;
    subtree.nodes.push_back(node);
  }
  return subtree;
}

// Empties the lists of evicted ids, one for each lane and one for states, with room for `most` ids in each.
void clear_lists(const radix::NodeStore& nodes, int64_t most, std::vector<Ids>& out) {
  out.resize(static_cast<size_t>(nodes.components().num_lanes()) + 1);
  for (Ids& ids : out) ids.clear();
  for (Ids& ids : out) ids.reserve(static_cast<size_t>(most));
}

void clear_lists(const radix::NodeStore& nodes, const Subtree& subtree, std::vector<Ids>& out) {
  int64_t most = 0;
  for (const NodeId node : subtree.nodes) most += nodes.at(node).size;
  clear_lists(nodes, most, out);
}

}  // namespace

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
  clear_lists(nodes_, most, out);
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

int64_t RadixTree::revoke(const radix::Query& query, int64_t valid, std::span<Receipt* const> receipts,
                          std::vector<Ids>& out) {
  const Match found = match(query, valid + 1);
  Subtree subtree;
  NodeId top = found.full_node;
  if (found.full_blocks > valid) {
    while (nodes_.at(top).depth > valid) top = nodes_.at(top).parent;
    subtree = list_subtree(nodes_, [&](NodeId node) { return node == top; });
  }
  clear_lists(nodes_, subtree, out);
  if (subtree.nodes.empty()) return 0;
  reserve(1 + static_cast<int64_t>(receipts.size()) * nodes_to_move());
  if (const int64_t blocks = valid - nodes_.at(top).depth; blocks > 0) {
    static_cast<void>(structure_.split(top, static_cast<int32_t>(blocks)));
  }
  const NodeId parent = nodes_.at(top).parent;
  for (Receipt* const receipt : receipts) {
    // Nodes that were split off since the subtree was listed end at `valid` or before.
    if (nodes_.end(receipt->node) <= valid) continue;
    if (subtree.is_in[static_cast<size_t>(receipt->node)] != 0) shorten(*receipt, valid);
  }
  // Without full lanes shorten() prunes nodes, whose ids splits before `valid` may have taken.
  std::erase_if(subtree.nodes, [&](NodeId node) { return nodes_.at(node).depth < valid || nodes_.at(node).size == 0; });
  const int64_t evicted = take_unpinned(subtree.nodes, out);
  structure_.prune(parent);
  shrink();
  return evicted;
}

int64_t RadixTree::evict_namespace(radix::NamespaceId space, std::vector<Ids>& out) {
  const Subtree subtree = list_subtree(nodes_, [&](NodeId node) {
    const NodeId parent = nodes_.at(node).parent;
    return parent < 0 && radix::namespace_of(parent) == space;
  });
  clear_lists(nodes_, subtree, out);
  const int64_t evicted = take_unpinned(subtree.nodes, out);
  shrink();
  return evicted;
}

// Evicts every node of a subtree, parents before their children, that is not pinned, from the leaves up; returns the
// number of blocks.
int64_t RadixTree::take_unpinned(std::span<const NodeId> subtree, std::vector<Ids>& out) {
  int64_t evicted = 0;
  for (auto it = subtree.rbegin(); it != subtree.rend(); ++it) {
    if (nodes_.at(*it).children > 0 || nodes_.at(*it).path_pins > 0) continue;
    evicted += nodes_.at(*it).size;
    static_cast<void>(eviction_.take_tail(*it, nodes_.at(*it).size, out));
  }
  return evicted;
}

radix::NodeId RadixTree::next_victim(int32_t component) {
  queues_.expire();
  if (evictable(component) <= 0) return kNoNode;
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
