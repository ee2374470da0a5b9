#include "pagecore/index/radix/retention/eviction_queues.hpp"

#include <new>

namespace pagecore::radix {

void EvictionQueues::expire() {
  for (int32_t c = 0; c < nodes_.components().count(); ++c) {
    const NodeHeap& expiries = of(c).expiries;
    while (!expiries.empty() && expiries.top_key().primary <= now_) {
      const NodeId node = expiries.top();
      nodes_.part(node, c).eviction.expire();
      refresh(node, c);
    }
  }
}

void EvictionQueues::change_count(NodeId node, int32_t component, int32_t by) {
  nodes_.part(node, component).count += by;
  of(component).held += by;
  if (is_limited(component)) {
    auto& [nodes, count] = protected_[static_cast<size_t>(component)];
    if (nodes.holds(node)) count += by;
  }
  if (nodes_.pins(node, component) == 0) of(component).evictable += by;
  refresh(node, component);
}

void EvictionQueues::pinned(NodeId node, int32_t component) {
  of(component).evictable -= nodes_.part(node, component).count;
  refresh(node, component);
}

void EvictionQueues::unpinned(NodeId node, int32_t component, const RetentionHint& hint) {
  Part& part = nodes_.part(node, component);
  of(component).evictable += part.count;
  touch(node, component, false);
  hint.apply(part.eviction, now_);
  refresh(node, component);
}

void EvictionQueues::refresh(NodeId node, int32_t component) {
  Component& it = of(component);
  if (is_limited(component)) refresh_protected(node, component);
  if (!can_go(node, component)) {
    it.queue.erase(node);
    if (policy_ == Policy::Priority) it.expiries.erase(node);
    return;
  }
  const EvictionState& eviction = nodes_.part(node, component).eviction;
  it.queue.put(node, key_of(node, component));
  if (policy_ != Policy::Priority) return;
  if (eviction.expiry < kNever) {
    it.expiries.put(node, {eviction.expiry, 0, 0});
  } else {
    it.expiries.erase(node);
  }
}

void EvictionQueues::refresh(NodeId node) {
  for (int32_t c = 0; c < nodes_.components().count(); ++c) refresh(node, c);
}

void EvictionQueues::remove(NodeId node) {
  for (Component& it : queues_) {
    it.queue.erase(node);
    if (policy_ == Policy::Priority) it.expiries.erase(node);
  }
  leave_protected(node);
}

void EvictionQueues::refresh_protected(NodeId node, int32_t component) {
  auto& [nodes, count] = protected_[static_cast<size_t>(component)];
  const Part& part = nodes_.part(node, component);
  const bool was_in = nodes.holds(node), is_in = is_protected(node, component);
  if (is_in) nodes.put(node, {0, part.eviction.used, -nodes_.at(node).depth});
  if (was_in && !is_in) nodes.erase(node);
  if (was_in != is_in) count += is_in ? part.count : -part.count;
}

void EvictionQueues::leave_protected(NodeId node) {
  for (int32_t c = 0; c < num_limited_; ++c) {
    auto& [nodes, count] = protected_[static_cast<size_t>(c)];
    if (!nodes.holds(node)) continue;
    nodes.erase(node);
    count -= nodes_.part(node, c).count;
  }
}

void EvictionQueues::limit_protected() {
  for (int32_t c = 0; c < num_limited_; ++c) {
    const auto& [nodes, count] = protected_[static_cast<size_t>(c)];
    const double limit = share_ * static_cast<double>(of(c).held);
    while (!nodes.empty()) {
      const NodeId node = nodes.top();
      Part& part = nodes_.part(node, c);
      if (static_cast<double>(count - part.count) < limit) break;
      begin_turn();
      part.eviction.hits = 0;
      part.eviction.used = turn_;
      refresh(node, c);
    }
  }
}

void EvictionQueues::start(NodeId node, int32_t component, const RetentionHint& hint) {
  EvictionState& eviction = nodes_.part(node, component).eviction;
  eviction = EvictionState{};
  eviction.used = eviction.made = turn_;
  eviction.clock = clock_;
  eviction.weight = rates_.weight(eviction);
  hint.initialise(eviction);
}

void EvictionQueues::change_kind(NodeId node, bool has_ended, bool EvictionState::* kind, bool value) {
  EvictionState& eviction = state_of(node);
  if (eviction.*kind == value) return;
  if (has_ended) rates_.count_end(eviction);
  eviction.*kind = value;
  eviction.is_reused = false;
  eviction.weight = rates_.weight(eviction);
  refresh(node, nodes_.components().state());
}

void EvictionQueues::set_branch(NodeId node, bool is_branch) {
  change_kind(node, true, &EvictionState::is_branch, is_branch);
}

void EvictionQueues::set_passed(NodeId node) { change_kind(node, true, &EvictionState::is_passed, true); }

// Without a hit in between, the sequence that the state continued has just gone on: the state did not serve another.
void EvictionQueues::set_next(NodeId node) {
  change_kind(node, state_of(node).is_reused, &EvictionState::has_next, true);
}

void EvictionQueues::use(NodeId node, const RetentionHint& hint) {
  for (int32_t c = 0; c < nodes_.components().count(); ++c) {
    touch(node, c, false);
    hint.apply(nodes_.part(node, c).eviction, now_);
    refresh(node, c);
  }
}

void EvictionQueues::value(NodeId node, const RetentionHint& hint, bool is_new) {
  for (int32_t c = 0; c < nodes_.components().count(); ++c) {
    EvictionState& eviction = nodes_.part(node, c).eviction;
    if (is_new) {
      hint.initialise(eviction);
    } else {
      hint.apply(eviction, now_);
    }
    refresh(node, c);
  }
}

void EvictionQueues::inherit(NodeId node, NodeId from) {
  for (int32_t c = 0; c < nodes_.components().count(); ++c) {
    EvictionState& eviction = nodes_.part(node, c).eviction;
    const EvictionState& other = nodes_.part(from, c).eviction;
    eviction.priority = other.priority;
    eviction.expiry = other.expiry;
    eviction.rank = other.rank;
    refresh(node, c);
  }
}

void EvictionQueues::reserve(size_t capacity) {
  if (capacity <= capacity_) return;
  for (Component& it : queues_) {
    it.queue.reserve(capacity);
    it.expiries.reserve(policy_ == Policy::Priority ? capacity : 0);
  }
  for (Protected& it : protected_) it.nodes.reserve(capacity);
  capacity_ = capacity;
}

void EvictionQueues::shrink(size_t capacity) noexcept {
  if (capacity >= capacity_) return;
  capacity_ = capacity;  // a heap that cannot shrink has more
  try {
    for (Component& it : queues_) {
      it.queue.shrink(capacity);
      it.expiries.shrink(policy_ == Policy::Priority ? capacity : 0);
    }
    for (Protected& it : protected_) it.nodes.shrink(capacity);
  } catch (const std::bad_alloc&) {
  }
}

size_t EvictionQueues::nbytes() const {
  size_t total = queues_.capacity() * sizeof(Component) + protected_.capacity() * sizeof(Protected);
  for (const Component& it : queues_) total += it.queue.nbytes() + it.expiries.nbytes();
  for (const Protected& it : protected_) total += it.nodes.nbytes();
  return total;
}

void EvictionQueues::check_invariants() const {
  const bool expires = policy_ == Policy::Priority;
  for (int32_t c = 0; c < nodes_.components().count(); ++c) {
    const auto& [queue, expiries, held, evictable] = of(c);
    queue.check_invariants();
    expiries.check_invariants();
    int64_t num_held = 0, num_evictable = 0, num_queued = 0;
    for (NodeId node = 0; node < nodes_.num_ids(); ++node) {
      if (nodes_.at(node).size == 0) continue;
      const EvictionState& eviction = nodes_.part(node, c).eviction;
      num_held += nodes_.part(node, c).count;
      num_evictable += nodes_.pins(node, c) > 0 ? 0 : nodes_.part(node, c).count;
      num_queued += can_go(node, c);
      PC_ASSERT(queue.holds(node) == can_go(node, c));
      PC_ASSERT(!expires || expiries.holds(node) == (can_go(node, c) && eviction.expiry < kNever));
      if (expires && expiries.holds(node)) PC_ASSERT(expiries.key(node).primary == eviction.expiry);
      if (!can_go(node, c)) continue;
      const HeapKey key = key_of(node, c);
      PC_ASSERT(!(queue.key(node) < key) && !(key < queue.key(node)));
    }
    PC_ASSERT(num_queued == queue.size());
    PC_ASSERT(num_held == held);
    PC_ASSERT(num_evictable == evictable);
  }
  for (int32_t c = 0; c < num_limited_; ++c) {
    const auto& [nodes, count] = protected_[static_cast<size_t>(c)];
    nodes.check_invariants();
    int64_t num_protected = 0;
    for (NodeId node = 0; node < nodes_.num_ids(); ++node) {
      const bool is_in = nodes_.at(node).size > 0 && is_protected(node, c);
      PC_ASSERT(nodes.holds(node) == is_in);
      if (!is_in) continue;
      num_protected += nodes_.part(node, c).count;
      PC_ASSERT(nodes.key(node).turn == nodes_.part(node, c).eviction.used);
      PC_ASSERT(nodes.key(node).depth == -nodes_.at(node).depth);
    }
    PC_ASSERT(num_protected == count);
  }
}

}  // namespace pagecore::radix
