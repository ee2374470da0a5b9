// Recounts everything that the tree keeps count of.
#include <algorithm>

#include "pagecore/index/radix_tree.hpp"

namespace pagecore {

using radix::kNoNode;
using radix::kNoState;

void RadixTree::check_invariants() const {
  map_.check_invariants();
  std::vector<int64_t> children(nodes_.size()), pinned_children(nodes_.size()), spaces(space_children_.size());
  int64_t live = 0;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const auto node = static_cast<NodeId>(i);
    if (at(node).size == 0) continue;
    ++live;
    check_node(node);
    const NodeId parent = at(node).parent;
    if (parent < 0) {
      ++spaces[static_cast<size_t>(-1 - parent)];
    } else {
      ++children[static_cast<size_t>(parent)];
      pinned_children[static_cast<size_t>(parent)] += at(node).path_pins > 0;
    }
  }
  PC_ASSERT(live == map_.size());
  PC_ASSERT(live + static_cast<int64_t>(free_nodes_.size()) == static_cast<int64_t>(nodes_.size()));
  for (size_t i = 0; i < nodes_.size(); ++i) {
    PC_ASSERT(nodes_[i].children == children[i]);
    PC_ASSERT(nodes_[i].path_pins == nodes_[i].receipts + pinned_children[i]);
  }
  for (size_t i = 0; i < spaces.size(); ++i) PC_ASSERT(spaces[i] == std::max(0, space_children_[i]));
  check_runs();
  check_parts();
  check_ids();
}

void RadixTree::check_node(NodeId node) const {
  const Node& it = at(node);
  PC_ASSERT(it.size > 0 && it.start >= 0 && it.start + it.size <= runs_[it.run].capacity);
  PC_ASSERT(it.depth == (it.parent < 0 ? 0 : at(it.parent).depth + at(it.parent).size));
  PC_ASSERT(it.parent < 0 || at(it.parent).size > 0);
  PC_ASSERT(it.hash == hash_(it.parent, runs_.tokens(it.run, it.start), block_size_, runs_[it.run].marks, it.start));
  PC_ASSERT(map_.find(it.hash, [&](NodeId child) { return child == node; }) == node);
  PC_ASSERT(part(node, 0).count == it.size);
  for (int32_t w = 1; w <= num_windows(); ++w) {
    const int32_t* const ids = lane(node, lane_of(w));
    PC_ASSERT(part(node, w).count == it.size - std::count(ids, ids + it.size, kNullBlock));
    const int32_t first = std::min(part(node, w).first, it.size);
    PC_ASSERT(std::count(ids, ids + first, kNullBlock) == first);
  }
  if (has_states_) PC_ASSERT(part(node, state_component()).count == (it.state != kNoState));
  PC_ASSERT(!is_empty(node));
}

void RadixTree::check_runs() const {
  std::vector<bool> is_seen(nodes_.size());
  size_t runs = 0;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const auto node = static_cast<NodeId>(i);
    if (at(node).size == 0 || at(node).previous != kNoNode) continue;
    const radix::Run& run = runs_[at(node).run];
    PC_ASSERT(run.first == node);
    ++runs;
    int64_t live = 0, end = 0;
    for (NodeId slice = node; slice != kNoNode; slice = at(slice).next) {
      PC_ASSERT(at(slice).run == at(node).run && at(slice).start >= end);
      PC_ASSERT(at(slice).next == kNoNode || at(at(slice).next).previous == slice);
      end = int64_t{at(slice).start} + at(slice).size;
      live += at(slice).size;
      is_seen[static_cast<size_t>(slice)] = true;
    }
    PC_ASSERT(live == run.live);
    PC_ASSERT(!radix::Runs::is_sparse(run) || runs_.was_memory_short());
  }
  PC_ASSERT(runs == runs_.size());
  for (size_t i = 0; i < nodes_.size(); ++i) PC_ASSERT(is_seen[i] == (nodes_[i].size > 0));
}

// Pins, sizes and heaps of each component, from the receipts.
void RadixTree::check_parts() const {
  for (int32_t c = 0; c < num_components_; ++c) {
    std::vector<int32_t> pins(nodes_.size());
    for (size_t i = 0; i < nodes_.size() && c > 0; ++i) {
      const auto end = static_cast<NodeId>(i);
      const int32_t receipts = at(end).size > 0 ? part(end, c).receipts : 0;
      if (receipts == 0) continue;
      const int64_t start = is_window(c) ? window_start(c, depth(end)) : depth(end) - 1;
      for (NodeId node = end; node >= 0 && depth(node) > start; node = at(node).parent) {
        PC_ASSERT(!is_window(c) || at(node).depth >= start);
        pins[static_cast<size_t>(node)] += receipts;
      }
    }
    const auto& heap = heaps_[static_cast<size_t>(c)];
    heap.check_invariants();
    const auto& expiries = expiries_[static_cast<size_t>(c)];
    const bool expires = policy_ == radix::Policy::Priority;
    expiries.check_invariants();
    int64_t held = 0, evictable = 0;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const auto node = static_cast<NodeId>(i);
      if (at(node).size == 0) {
        PC_ASSERT(!heap.holds(node) && !(expires && expiries.holds(node)));
        continue;
      }
      const Part& it = part(node, c);
      PC_ASSERT(c == 0 || it.pins == pins[i]);
      PC_ASSERT(it.receipts <= at(node).receipts);
      held += it.count;
      evictable += is_pinned(node, c) ? 0 : it.count;
      const bool can_go = it.count > 0 && !is_pinned(node, c) && (c > 0 || at(node).children == 0);
      PC_ASSERT(heap.holds(node) == can_go);
      PC_ASSERT(!expires || expiries.holds(node) == (can_go && it.eviction.expiry < radix::kNever));
      if (expires && expiries.holds(node)) PC_ASSERT(expiries.key(node).worth == it.eviction.expiry);
      if (!can_go) continue;
      const radix::HeapKey wanted = key_of(policy_, it.eviction, at(node).depth);
      PC_ASSERT(!(heap.key(node) < wanted) && !(wanted < heap.key(node)));
    }
    PC_ASSERT(held == held_[static_cast<size_t>(c)]);
    PC_ASSERT(evictable == evictable_[static_cast<size_t>(c)]);
  }
}

// Every id that a node has is noted as held, no id twice.
void RadixTree::check_ids() const {
  for (int32_t i = 0; i <= num_lanes(); ++i) {
    const radix::HeldIds& held = held_ids_[static_cast<size_t>(i)];
    Ids ids;
    for (size_t n = 0; n < nodes_.size(); ++n) {
      const auto node = static_cast<NodeId>(n);
      if (at(node).size == 0) continue;
      if (i == num_lanes()) {
        if (at(node).state != kNoState) ids.push_back(at(node).state);
        continue;
      }
      for (int32_t j = 0; j < at(node).size; ++j) {
        if (lane(node, i)[j] != kNullBlock) ids.push_back(lane(node, i)[j]);
        PC_ASSERT(i >= full_lanes_ || lane(node, i)[j] > kNullBlock);
      }
    }
    std::sort(ids.begin(), ids.end());
    PC_ASSERT(std::adjacent_find(ids.begin(), ids.end()) == ids.end());
    PC_ASSERT(static_cast<int64_t>(ids.size()) == held.count());
    PC_ASSERT(std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return held.holds(id); }));
  }
}

}  // namespace pagecore
