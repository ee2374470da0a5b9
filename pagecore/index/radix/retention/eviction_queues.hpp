// Eviction order: for each component, a queue of the nodes that can lose it, worst first.
//
// I1: the queue of a component has a node iff the node can lose the component now: full: an unpinned leaf; window or
//     state: an unpinned node with an id there. Its key is that of the node's eviction state; in windows, the rank of
//     what a node can spare (see Spare) precedes the last use.
// I2: with policy Priority, `expiries` has the nodes of the queue whose priority expires, keyed by the time of that.
// I3: evictable + pinned = held, where evictable counts the ids of unpinned nodes.
// I4: with policy Slru, protected_ has, for the full component and each window, the protected nodes with ids, the least
//     recently used first, and the number of those ids. After a hit, all of them but the first have less than share_ of
//     the held ids.
// A node enters and leaves the queues through refresh(), after any change of its count, pins, children or depth.
// Cost: O(log n) a refresh of one component. Memory: 36 bytes a node and component, doubled for Priority and Slru;
// all taken by reserve(), nothing else fails. Threads: one writer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "pagecore/index/radix/nodes/node_store.hpp"

namespace pagecore::radix {

// Answers often have fewer tokens: the prompt, which another sequence may continue, ends that far before the end of its
// sequence, or later.
inline constexpr int64_t kNearTokens = 1024;

class EvictionQueues {
 public:
  EvictionQueues(NodeStore& nodes, Policy policy, double share)
      : nodes_(nodes),
        policy_(policy),
        queues_(static_cast<size_t>(nodes.components().count())),
        num_limited_(policy == Policy::Slru ? 1 + nodes.components().num_windows() : 0),
        share_(share),
        protected_(static_cast<size_t>(num_limited_)) {}
  EvictionQueues(const EvictionQueues&) = delete;
  EvictionQueues& operator=(const EvictionQueues&) = delete;

  // Time: a turn for each call that changes the tree, and the caller's clock, which never runs backwards.

  void begin_turn() { ++turn_; }
  [[nodiscard]] uint64_t turn() const { return turn_; }
  void advance(double time) { now_ = std::max(now_, time); }

  // Sizes and order.

  [[nodiscard]] int64_t held(int32_t component) const { return of(component).held; }
  [[nodiscard]] int64_t evictable(int32_t component) const { return of(component).evictable; }
  // Precondition: evictable(component) > 0, and expire() was called in this turn.
  [[nodiscard]] NodeId worst(int32_t component) const {
    PC_ASSERT(!of(component).queue.empty());
    return of(component).queue.top();
  }
  // Resets the priorities that have expired by now.
  void expire();
  // The first ids of a window in a node, which are evicted together. Rank 0: they are far from the end of the node,
  // where few prompts end. Rank 1: a prefix that ends with the node does not need them. Rank 2: it does.
  struct Spare {
    int32_t rank;  // 0, 1 or 2: nodes with a lower one go first
    int32_t count;
  };
  [[nodiscard]] Spare spare(NodeId node, int32_t window) const {
    const int32_t count = nodes_.part(node, window).count;
    const Components& all = nodes_.components();
    const int64_t needed = all.window_blocks(window, nodes_.end(node));
    const int64_t near = needed + kNearTokens / all.block_size;
    if (!is_by_use(policy_) || count <= needed) return {2, count};
    return {count > near ? 0 : 1, count - static_cast<int32_t>(count > near ? near : needed)};
  }
  // Advances the clock of states to the deadline of one that is evicted.
  void age(const EvictionState& gone) { clock_ = std::max(clock_, gone.deadline()); }

  // Changes of nodes.

  // Adds `by` to the ids that the node has of a component.
  void change_count(NodeId node, int32_t component, int32_t by);
  // Called after the pins of a component went from 0 to 1, or from 1 to 0, which ends its use.
  void pinned(NodeId node, int32_t component);
  void unpinned(NodeId node, int32_t component, const RetentionHint& hint);
  void refresh(NodeId node, int32_t component);
  void refresh(NodeId node);  // of every component
  // Before a node is split or joined: its ids no longer count as protected until refresh().
  void leave_protected(NodeId node);
  // After a hit: nodes above the limit of Slru lose their hits, the least recently used first, and become the most
  // recently used of those without hits. Each has a turn of its own.
  void limit_protected();
  // Takes the node out of every queue.
  void remove(NodeId node);

  // Changes of eviction states; refresh() follows, by the caller unless noted.

  void touch(NodeId node, int32_t component, bool is_hit) {
    EvictionState& eviction = nodes_.part(node, component).eviction;
    eviction.used = turn_;
    eviction.clock = clock_;
    eviction.weight = rates_.weight(eviction);
    if (is_hit && eviction.hits < std::numeric_limits<int32_t>::max()) ++eviction.hits;
    if (is_limited(component)) refresh_protected(node, component);
  }
  // A new component: its first use is this turn.
  void start(NodeId node, int32_t component, const RetentionHint& hint);
  // States. A state was hit, or would have been if it had not been evicted.
  void reuse_state(NodeId node) { rates_.count_reuse(state_of(node)); }
  // A state leaves the tree with the end of its node.
  void end_state(NodeId node) {
    rates_.count_end(state_of(node));
    state_of(node).evicted_after = static_cast<int32_t>(nodes_.end(node));
  }
  // Changes of the kind of a state; they refresh.
  void set_branch(NodeId node, bool is_branch);
  void set_passed(NodeId node);
  void set_next(NodeId node);
  // A use of every component by an insertion; refreshes.
  void use(NodeId node, const RetentionHint& hint);
  // Gives a node a value, without using it; a new one takes it even if it is lower. Refreshes.
  void value(NodeId node, const RetentionHint& hint, bool is_new);
  // Copies priority and rank of every component; refreshes.
  void inherit(NodeId node, NodeId from);

  // Makes room for nodes with ids below `capacity`.
  void reserve(size_t capacity);
  // Reduces the room to `capacity`, above every id in the queues; keeps it if memory is short.
  void shrink(size_t capacity) noexcept;
  // True if the policy orders nodes by their insertion, or by their hits since then.
  [[nodiscard]] bool looks_at_insertions() const {
    return policy_ == Policy::Fifo || policy_ == Policy::Filo || looks_at_hits();
  }
  [[nodiscard]] bool looks_at_hits() const { return policy_ == Policy::Lfu || policy_ == Policy::Slru; }
  [[nodiscard]] size_t capacity() const { return capacity_; }
  [[nodiscard]] size_t nbytes() const;
  void check_invariants() const;

 private:
  struct Component {
    NodeHeap queue;
    NodeHeap expiries;
    int64_t held = 0;
    int64_t evictable = 0;
  };
  struct Protected {
    NodeHeap nodes;
    int64_t count = 0;
  };
  [[nodiscard]] Component& of(int32_t component) { return queues_[static_cast<size_t>(component)]; }
  [[nodiscard]] const Component& of(int32_t component) const { return queues_[static_cast<size_t>(component)]; }
  [[nodiscard]] bool can_go(NodeId node, int32_t component) const {
    return nodes_.part(node, component).count > 0 && nodes_.pins(node, component) == 0 &&
           (component != 0 || nodes_.at(node).children == 0);
  }

  // Breaks ties: the node nearer the root goes first, but the sinks of a window, without which the other blocks serve
  // no prefix, go last.
  [[nodiscard]] int32_t rank_of(NodeId node, int32_t component) const {
    constexpr int32_t kLast = 1 << 30;
    const int32_t depth = nodes_.at(node).depth;
    return depth < nodes_.components().sink_blocks(component) ? depth | kLast : depth;
  }

  // Key of a node that can lose a component.
  [[nodiscard]] HeapKey key_of(NodeId node, int32_t component) const {
    HeapKey key = eviction_key(policy_, nodes_.part(node, component).eviction, rank_of(node, component));
    if (!nodes_.components().is_window(component) || !is_by_use(policy_)) return key;
    if (policy_ == Policy::Lru) key.primary = 0;  // the clock is for states
    key.turn |= static_cast<uint64_t>(spare(node, component).rank) << 62;
    return key;
  }

  // True if the ids that the policy protects have a limit.
  [[nodiscard]] bool is_limited(int32_t component) const { return component < num_limited_; }
  [[nodiscard]] bool is_protected(NodeId node, int32_t component) const {
    const Part& part = nodes_.part(node, component);
    return part.count > 0 && part.eviction.is_protected();
  }
  [[nodiscard]] EvictionState& state_of(NodeId node) { return nodes_.part(node, nodes_.components().state()).eviction; }
  void refresh_protected(NodeId node, int32_t component);
  void change_kind(NodeId node, bool has_ended, bool EvictionState::* kind, bool value);

  NodeStore& nodes_;
  Policy policy_;
  std::vector<Component> queues_;
  int32_t num_limited_;  // components whose protected ids have a limit
  double share_;         // of the held ids, that limit
  std::vector<Protected> protected_;
  size_t capacity_ = 0;  // that every heap has at least
  uint64_t turn_ = 0;
  uint64_t clock_ = 0;  // of states
  ReuseRates rates_;
  double now_ = -kNever;
};

}  // namespace pagecore::radix
