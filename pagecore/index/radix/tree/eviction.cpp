#include "pagecore/index/radix/tree/eviction.hpp"

#include <algorithm>
#include <iterator>
#include <span>

namespace pagecore::radix {

int64_t Eviction::take(int32_t component, int64_t amount, std::vector<Ids>& out) {
  if (component == 0) return take_blocks(amount, out);
  const Components& components = nodes_.components();
  if (components.is_window(component)) {
    take_window(component, amount, out[static_cast<size_t>(components.lane_of(component))]);
  } else {
    take_states(amount, out.back());
  }
  return amount;
}

NodeId Eviction::take_tail(NodeId leaf, int32_t blocks, std::vector<Ids>& out) {
  give_up_tail(leaf, blocks, out);
  if (blocks < nodes_.at(leaf).size) {
    nodes_.trim(leaf, blocks);
    queues_.refresh(leaf);  // what its windows can spare depends on its end
    return leaf;
  }
  const NodeId parent = nodes_.at(leaf).parent;
  structure_.remove_leaf(leaf);
  return parent;
}

int64_t Eviction::take_blocks(int64_t amount, std::vector<Ids>& out) {
  int64_t left = amount;
  while (left > 0) {
    queues_.expire();  // parents that have just become leaves are in the queue now
    const NodeId leaf = queues_.worst(0);
    const auto blocks = static_cast<int32_t>(std::min<int64_t>(left, nodes_.at(leaf).size));
    left -= blocks + structure_.prune(take_tail(leaf, blocks, out));
  }
  prefetch_next();
  return amount - left;
}

// Evictions come in series, and nothing has read the ids of the next leaf since they were inserted.
void Eviction::prefetch_next() const {
  if (queues_.evictable(0) <= 0) return;
  const NodeId leaf = queues_.worst(0);
  constexpr int32_t kLine = 64 / sizeof(int32_t), kMostIds = 64 * kLine;
  const Node& it = nodes_.at(leaf);
  for (int32_t i = 0; i < nodes_.components().full_lanes; ++i) {
    const int32_t* const ids = nodes_.lane(leaf, i);
    for (int32_t j = std::max(0, it.size - kMostIds); j < it.size; j += kLine) __builtin_prefetch(ids + j);
  }
}

void Eviction::give_up_tail(NodeId leaf, int32_t blocks, std::vector<Ids>& out) {
  const Components& components = nodes_.components();
  const int32_t size = nodes_.at(leaf).size;
  journal_.note_tail(leaf, blocks);
  for (int32_t i = 0; i < components.num_lanes(); ++i) {
    Ids& ids = out[static_cast<size_t>(i)];
    const int32_t* const held = nodes_.lane(leaf, i);
    const size_t before = ids.size();
    const std::reverse_iterator last(held + size), end(held + size - blocks);
    if (i < components.full_lanes) {  // no id is null
      ids.insert(ids.end(), last, end);
    } else {
      std::copy_if(last, end, std::back_inserter(ids), [](int32_t id) { return id != kNullBlock; });
    }
    claims_.held(i).erase(std::span(ids).subspan(before));
    const int32_t window = components.owner_of(i);
    if (window > 0) queues_.change_count(leaf, window, -static_cast<int32_t>(ids.size() - before));
  }
  queues_.change_count(leaf, 0, -blocks);
  int32_t& state = nodes_.at(leaf).state;
  if (state == kNoState) return;
  queues_.end_state(leaf);
  out.back().push_back(state);
  claims_.states().erase(state);
  state = kNoState;
  queues_.change_count(leaf, components.state(), -1);
}

// The first blocks of a node go first: the last ones serve the longest prefix.
void Eviction::take_window(int32_t window, int64_t amount, Ids& out) {
  const int32_t lane = nodes_.components().lane_of(window);
  for (int64_t left = amount; left > 0;) {
    const NodeId node = queues_.worst(window);
    Part& part = nodes_.part(node, window);
    int32_t* const ids = nodes_.lane(node, lane);
    const auto blocks = static_cast<int32_t>(std::min<int64_t>(left, queues_.spare(node, window).count));
    for (int32_t taken = 0; taken < blocks; ++part.first) {
      int32_t& id = ids[part.first];
      if (id == kNullBlock) continue;
      journal_.note_removed(window, node, part.first);
      out.push_back(id);
      claims_.held(lane).erase(id);
      id = kNullBlock;
      ++taken;
    }
    queues_.change_count(node, window, -blocks);
    structure_.prune(node);
    left -= blocks;
  }
}

void Eviction::take_states(int64_t amount, Ids& out) {
  const int32_t component = nodes_.components().state();
  for (int64_t i = 0; i < amount; ++i) {
    const NodeId node = queues_.worst(component);
    queues_.age(nodes_.part(node, component).eviction);
    queues_.end_state(node);
    int32_t& state = nodes_.at(node).state;
    journal_.note_removed(component, node, nodes_.at(node).size - 1);
    out.push_back(state);
    claims_.states().erase(state);
    state = kNoState;
    queues_.change_count(node, component, -1);
    if (nodes_.part(node, component).eviction.is_branch) branches_.note(nodes_.at(node).parent);
    structure_.prune(node);
  }
}

}  // namespace pagecore::radix
