// Eviction, worst first. The caller owns the references: it frees the ids that are returned.
#include <algorithm>

#include "pagecore/index/radix/tree/tree.hpp"

namespace pagecore {

using radix::kNoState;

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
  const int64_t evicted =
      component == 0 ? evict_full(amount, out)
      : components_.is_window(component)
          ? evict_window(component, amount, out[static_cast<size_t>(components_.lane_of(component))])
          : evict_states(amount, out.back());
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
    node = take_tail(node, blocks, out);
    if (node != parent) break;
  }
  prune(node);
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
    static_cast<void>(take_tail(node, nodes_.at(node).size, out));
  }
  shrink();
  return evicted;
}

radix::NodeId RadixTree::next_victim(int32_t component) {
  queues_.expire();
  if (evictable(component) <= 0) return radix::kNoNode;
  return queues_.worst(component);
}

// Evicts blocks from the tails of leaves; more than `amount` if the rest of a path is left empty.
int64_t RadixTree::evict_full(int64_t amount, std::vector<Ids>& out) {
  int64_t left = amount;
  while (left > 0) {
    queues_.expire();  // parents that have just become leaves are in the queue now
    const NodeId leaf = queues_.worst(0);
    const auto blocks = static_cast<int32_t>(std::min<int64_t>(left, nodes_.at(leaf).size));
    left -= blocks + prune(take_tail(leaf, blocks, out));
  }
  return amount - left;
}

// Removes the last `blocks` blocks of a leaf; returns the leaf, or its parent if nothing is left of it.
radix::NodeId RadixTree::take_tail(NodeId leaf, int32_t blocks, std::vector<Ids>& out) {
  give_up_tail(leaf, blocks, out);
  if (blocks < nodes_.at(leaf).size) {
    nodes_.trim(leaf, blocks);
    return leaf;
  }
  const NodeId parent = nodes_.at(leaf).parent;
  remove_leaf(leaf);
  return parent;
}

// Takes the ids of every component from the last `blocks` blocks of a leaf.
void RadixTree::give_up_tail(NodeId leaf, int32_t blocks, std::vector<Ids>& out) {
  const int32_t size = nodes_.at(leaf).size;
  if (journal_ != nullptr) note_tail(leaf, blocks);
  for (int32_t i = 0; i < num_lanes(); ++i) {
    Ids& ids = out[static_cast<size_t>(i)];
    const int32_t* const held = nodes_.lane(leaf, i);
    const size_t before = ids.size();
    for (int32_t j = size - 1; j >= size - blocks; --j) {
      if (held[j] != kNullBlock) ids.push_back(held[j]);
    }
    claims_.held(i).erase(std::span(ids).subspan(before));
    const int32_t window = components_.owner_of(i);
    if (window > 0) queues_.change_count(leaf, window, -static_cast<int32_t>(ids.size() - before));
  }
  queues_.change_count(leaf, 0, -blocks);
  int32_t& state = nodes_.at(leaf).state;
  if (state == kNoState) return;
  queues_.end_state(leaf);
  out.back().push_back(state);
  claims_.states().erase(state);
  state = kNoState;
  queues_.change_count(leaf, components_.state(), -1);
}

// Evicts the first blocks of a node first: the last ones serve the longest prefix.
int64_t RadixTree::evict_window(int32_t window, int64_t amount, Ids& out) {
  const int32_t lane = components_.lane_of(window);
  for (int64_t left = amount; left > 0;) {
    const NodeId node = queues_.worst(window);
    radix::Part& part = nodes_.part(node, window);
    int32_t* const ids = nodes_.lane(node, lane);
    const auto blocks = static_cast<int32_t>(std::min<int64_t>(left, part.count));
    for (int32_t taken = 0; taken < blocks; ++part.first) {
      int32_t& id = ids[part.first];
      if (id == kNullBlock) continue;
      if (journal_ != nullptr) note_removed(window, node, part.first);
      out.push_back(id);
      claims_.held(lane).erase(id);
      id = kNullBlock;
      ++taken;
    }
    queues_.change_count(node, window, -blocks);
    prune(node);
    left -= blocks;
  }
  return amount;
}

int64_t RadixTree::evict_states(int64_t amount, Ids& out) {
  for (int64_t i = 0; i < amount; ++i) {
    const NodeId node = queues_.worst(components_.state());
    queues_.age(nodes_.part(node, components_.state()).eviction);
    queues_.end_state(node);
    int32_t& state = nodes_.at(node).state;
    if (journal_ != nullptr) note_removed(components_.state(), node, nodes_.at(node).size - 1);
    out.push_back(state);
    claims_.states().erase(state);
    state = kNoState;
    queues_.change_count(node, components_.state(), -1);
    if (nodes_.part(node, components_.state()).eviction.is_branch) note_branch(nodes_.at(node).parent);
    prune(node);
  }
  return amount;
}

// Returns memory that the tree no longer needs, now and then.
void RadixTree::shrink() noexcept {
  if (!nodes_.shrink()) return;
  queues_.shrink(nodes_.capacity());
  claims_.shrink();
  path_ = {};
}

}  // namespace pagecore
