// What goes, worst first. The caller owns the references: it frees the ids that come back.
#include <algorithm>

#include "pagecore/index/radix_tree.hpp"

namespace pagecore {

using radix::kNoState;

int64_t RadixTree::evict(int32_t component, int64_t amount, std::vector<Ids>& out, double time) {
  amount = std::min(amount, evictable(component));
  out.resize(static_cast<size_t>(num_lanes()) + 1);
  for (Ids& ids : out) ids.clear();
  for (int32_t i = 0; i <= num_lanes(); ++i) {
    const bool is_state = i == num_lanes();
    const int32_t of = is_state ? state_component() : i < full_lanes_ ? 0 : i - full_lanes_ + 1;
    if (of < 0 || (component != 0 && of != component)) continue;
    out[static_cast<size_t>(i)].reserve(static_cast<size_t>(std::min(amount, held(of))));
  }
  advance(time);
  if (amount <= 0) return 0;
  expire();
  const int64_t evicted = component == 0         ? evict_full(amount, out)
                          : is_window(component) ? evict_window(component, amount, out)
                                                 : evict_states(amount, out);
  shrink();
  return evicted;
}

// A priority that has had its time falls back to the default.
void RadixTree::expire() {
  for (int32_t c = 0; c < num_components_; ++c) {
    radix::NodeHeap& expiries = expiries_[static_cast<size_t>(c)];
    while (!expiries.empty() && expiries.top_key().worth <= now_) {
      const NodeId node = expiries.top();
      radix::EvictionState& eviction = part(node, c).eviction;
      eviction.priority = radix::kDefaultPriority;
      eviction.expiry = radix::kNever;
      refresh(node, c);
    }
  }
}

// More where the rest of a path is left without anything.
int64_t RadixTree::evict_full(int64_t amount, std::vector<Ids>& out) {
  int64_t left = amount;
  while (left > 0) {
    expire();  // also what became a leaf just now
    PC_ASSERT(!heaps_[0].empty());
    const NodeId node = heaps_[0].top();
    const auto blocks = static_cast<int32_t>(std::min<int64_t>(left, at(node).size));
    give_up_tail(node, blocks, out);
    NodeId rest = node;
    if (blocks == at(node).size) {
      rest = at(node).parent;
      remove_leaf(node);
    } else {
      trim(node, blocks);
    }
    left -= blocks + prune(rest);
  }
  return amount - left;
}

// Everything that the last `blocks` of a leaf hold, in every component.
void RadixTree::give_up_tail(NodeId node, int32_t blocks, std::vector<Ids>& out) {
  const int32_t first = at(node).size - blocks;
  for (int32_t i = 0; i < num_lanes(); ++i) {
    Ids& ids = out[static_cast<size_t>(i)];
    const int32_t* const held = lane(node, i);
    const size_t before = ids.size();
    for (int32_t j = at(node).size - 1; j >= first; --j) {
      if (held[j] != kNullBlock) ids.push_back(held[j]);
    }
    held_ids_[static_cast<size_t>(i)].erase(std::span(ids).subspan(before));
    if (i >= full_lanes_) change_count(node, i - full_lanes_ + 1, -static_cast<int32_t>(ids.size() - before));
  }
  change_count(node, 0, -blocks);
  if (at(node).state == kNoState) return;
  out.back().push_back(at(node).state);
  held_ids_.back().erase(at(node).state);
  at(node).state = kNoState;
  change_count(node, state_component(), -1);
}

// A window loses its first blocks first: the last ones serve the longest prefix.
int64_t RadixTree::evict_window(int32_t window, int64_t amount, std::vector<Ids>& out) {
  const radix::NodeHeap& heap = heaps_[static_cast<size_t>(window)];
  const int32_t which = lane_of(window);
  Ids& gone = out[static_cast<size_t>(which)];
  int64_t left = amount;
  while (left > 0) {
    PC_ASSERT(!heap.empty());
    const NodeId node = heap.top();
    Part& it = part(node, window);
    int32_t* const ids = lane(node, which);
    const auto blocks = static_cast<int32_t>(std::min<int64_t>(left, it.count));
    for (int32_t taken = 0; taken < blocks; ++it.first) {
      if (ids[it.first] == kNullBlock) continue;
      gone.push_back(ids[it.first]);
      held_ids_[static_cast<size_t>(which)].erase(ids[it.first]);
      ids[it.first] = kNullBlock;
      ++taken;
    }
    change_count(node, window, -blocks);
    prune(node);
    left -= blocks;
  }
  return amount;
}

int64_t RadixTree::evict_states(int64_t amount, std::vector<Ids>& out) {
  for (int64_t i = 0; i < amount; ++i) {
    PC_ASSERT(!heaps_.back().empty());
    const NodeId node = heaps_.back().top();
    out.back().push_back(at(node).state);
    held_ids_.back().erase(at(node).state);
    at(node).state = kNoState;
    change_count(node, state_component(), -1);
    prune(node);
  }
  return amount;
}

}  // namespace pagecore
