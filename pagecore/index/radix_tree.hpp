// The prefix cache: which blocks hold the keys and values of a prefix that was computed before.
//
//   namespace ── A [blocks 0..12) ─┬─ B [12..16)          a node is a slice of a run (radix_runs.hpp); an edge is whole
//                                  └─ C [12..64)          blocks; children differ in their first block
//
// Components: "full" (every node has it: its blocks, or without full lanes only their tokens), a window each (ids of
// its lane, null where evicted: a tombstone), and a state (one id at a node's end). The tree decides and frees nothing:
// it answers with ids, and the caller owns the references.
//
// I1: path_pins = receipts at the node + pinned children; what has none can be evicted, and so can all below it.
// I2: pins of a window or state = receipts that hold it there; a receipt of a window pins the nodes that make up the
//     last `window` tokens before its end, which are whole nodes, because locking splits at both ends.
// I3: a heap holds what can go now: full: an unpinned leaf; window: ids there, unpinned; state: there, unpinned.
// I4: an id is held once in its lane. I5: evictable + protected = held, for each component.
// I6: the lower half of a split keeps the node's id, and with it its receipts, children and state.
// I7: without full lanes an unpinned leaf has something in a window, or a state.
// All or nothing: memory is taken and everything checked before a node changes.
// Cost: match O(tokens); lock and unlock O(nodes whose pins go 0 <-> 1); evicting O(log n) a node. No recursion.
// Threads: one writer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "pagecore/index/radix_held.hpp"
#include "pagecore/index/radix_map.hpp"
#include "pagecore/index/radix_policy.hpp"
#include "pagecore/index/radix_runs.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore {

class RadixTree {
 public:
  using NodeId = radix::NodeId;
  using Ids = std::vector<int32_t>;

  struct Options {
    int64_t block_size = 16;
    int64_t full_lanes = 1;        // 0: nodes hold only tokens, for windows or states
    std::vector<int64_t> windows;  // in tokens
    bool has_states = false;
    int64_t state_interval = 0;  // tokens between the checkpoints that a caller makes
    radix::Policy policy = radix::Policy::Lru;
  };
  struct Match {
    int64_t blocks = 0;       // that all components can reuse
    int64_t full_blocks = 0;  // that the full component has
    int64_t checkpoint = 0;   // tokens after which a new state would serve this prefix; 0: nowhere
    NodeId node = radix::kNoNode;
    int32_t offset = 0;  // blocks of the node within the reusable prefix
    int32_t state = radix::kNoState;
  };
  struct State {
    int64_t blocks;  // it stands after them
    int32_t id;
  };
  struct Offer {
    radix::Query query;
    std::vector<const int32_t*> lanes;  // whole blocks of the query, each
    std::span<const State> states;      // in order
    radix::RetentionHint hint;
    double time = -radix::kNever;  // of the caller's clock
  };
  // By lane; the states come last.
  struct Inserted {
    int64_t blocks = 0;      // whole blocks of the query: what the tree has now
    int64_t old_blocks = 0;  // of those, what it had before
    std::vector<Ids> taken;
    std::vector<Ids> duplicates;
  };
  struct Receipt {
    NodeId node = radix::kNoNode;
    uint32_t components = 0;  // a bit each; 0: given back
  };
  // What the offers of a batch need, by offer: the answer, with room for all ids, and the memory of a new node.
  struct Batch {
    std::vector<Inserted> answers;
    std::vector<radix::Run> runs;
  };

  explicit RadixTree(const Options& options);
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  [[nodiscard]] radix::NamespaceId add_namespace();
  // A namespace that has lost its last node and got no other, or -1; its number is handed out again once it is
  // forgotten.
  [[nodiscard]] radix::NamespaceId dead_namespace() noexcept;
  void forget_dead_namespace() noexcept;
  void drop_namespace_if_empty(radix::NamespaceId space) noexcept;

  // At most `limit` blocks; changes nothing.
  [[nodiscard]] Match match(const radix::Query& query, int64_t limit) const;
  // The ids of a match, or of a receipt's path, from its first block on; a window's lane is null before the window.
  void copy_blocks(NodeId node, int32_t offset, int32_t lane, std::span<int32_t> out) const;

  // Pins what match() found, and counts the use; only other lock() calls may come in between. The match's node may
  // become another.
  [[nodiscard]] Receipt lock(Match& match, uint32_t components);
  // Memory for `count` calls of lock(), which then cannot fail.
  void reserve_locks(int64_t count) { reserve(count * (1 + num_windows())); }
  [[nodiscard]] Receipt lock_again(const Receipt& receipt);
  void unlock(Receipt& receipt, uint32_t components, const radix::RetentionHint& hint);

  // `receipt`, where there is one, moves to the end of what is inserted. `spare`, where there is one, is memory for a
  // new node, from prepare_all().
  void insert(const Offer& offer, Receipt* receipt, Inserted& out, radix::Run* spare = nullptr);
  // The same for a sequence that runs on from where its receipt ends: what lies before is what the receipt holds, and
  // is not looked at. The query's namespace counts only where the receipt holds nothing; marks and states there are
  // none.
  void extend(const Offer& offer, Receipt& receipt, Inserted& out);
  // Throws where one of them could not be inserted after those before it. Otherwise insert() cannot fail for any of
  // them, in this order, with its part of the batch and with no other call in between.
  void prepare_all(std::span<const Offer> offers, Batch& batch);
  // The last out.size() ids of the path that ends with `end`.
  void copy_tail(NodeId end, int32_t lane, std::span<int32_t> out) const;
  // The id of one block of it, counted from the start of the prefix.
  [[nodiscard]] int32_t id_at(NodeId end, int64_t block, int32_t lane) const;
  // Puts `id` there, the null block in a window only, and returns what stood there.
  int32_t replace_id(NodeId end, int64_t block, int32_t lane, int32_t id);
  // Gives up min(amount, evictable(component)), and returns how many; without full lanes, of component 0 also what is
  // left empty then. out has a list for each lane and one for the states. `time` is as for advance().
  int64_t evict(int32_t component, int64_t amount, std::vector<Ids>& out, double time = -radix::kNever);

  // For callers whose own change must not fail half way. After reserve(n), which throws or changes nothing that can be
  // observed, shorten() and lock() of receipts cannot fail while they make at most n nodes: nodes_to_move() for each.
  // After reserve_ids(), replace_id() cannot fail. unlock(), lock_again() and evict() of at most kReservedIds never do.
  static constexpr int64_t kReservedIds = 4096;
  void reserve(int64_t nodes);
  void reserve_ids(int32_t lane, int32_t num_ids);
  void reserve_evicted(std::vector<Ids>& out) const;
  [[nodiscard]] int64_t nodes_to_move() const { return 2 + num_windows(); }
  // The receipt holds the first `blocks` of its path from now on; 0 leaves a receipt on nothing.
  void shorten(Receipt& receipt, int64_t blocks) noexcept;
  // extend() and insert() that return false, with nothing changed, where they would throw.
  [[nodiscard]] bool try_extend(const Offer& offer, Receipt& receipt, Inserted& out) noexcept;
  [[nodiscard]] bool try_insert(const Offer& offer, Receipt& receipt, Inserted& out) noexcept;
  // Receipts that keep a block of the path from being evicted in a component: those that end at or below its node, or
  // whose window has it; pinned children count once.
  [[nodiscard]] int32_t num_pins(NodeId end, int64_t block, int32_t component) const;

  // The latest time that was given; it never runs backwards.
  void advance(double time) { now_ = std::max(now_, time); }

  [[nodiscard]] int64_t evictable(int32_t component) const { return evictable_[static_cast<size_t>(component)]; }
  [[nodiscard]] int64_t held(int32_t component) const { return held_[static_cast<size_t>(component)]; }
  // Every id that a lane holds, ascending; the states stand after the last lane.
  [[nodiscard]] Ids held_ids(int32_t lane) const {
    Ids ids;
    ids.reserve(static_cast<size_t>(held_ids_[static_cast<size_t>(lane)].count()));
    held_ids_[static_cast<size_t>(lane)].list(ids);
    return ids;
  }
  [[nodiscard]] int32_t num_components() const { return num_components_; }
  [[nodiscard]] int32_t num_lanes() const { return full_lanes_ + num_windows(); }
  [[nodiscard]] int64_t num_nodes() const { return map_.size(); }
  [[nodiscard]] int64_t num_receipts() const { return num_receipts_; }
  [[nodiscard]] int64_t depth(NodeId node) const { return node < 0 ? 0 : int64_t{at(node).depth} + at(node).size; }
  [[nodiscard]] size_t nbytes() const;
  void check_invariants() const;

 private:
  struct Node {
    NodeId parent = radix::kNoNode;  // -1 - namespace at the top
    radix::RunId run = 0;
    int32_t start = 0;                                        // in the run, in blocks
    int32_t size = 0;                                         // 0: not in use
    int32_t depth = 0;                                        // blocks before it
    NodeId previous = radix::kNoNode, next = radix::kNoNode;  // slices of its run
    uint32_t hash = 0;
    int32_t children = 0;
    int32_t receipts = 0;
    int32_t path_pins = 0;
    int32_t state = radix::kNoState;
  };
  // A node's eviction in one component.
  struct Part {
    radix::EvictionState eviction;
    int32_t count = 0;     // ids: blocks of the full component, those that are left of a window, 1 for a state
    int32_t pins = 0;      // of a window or state
    int32_t receipts = 0;  // that end here and hold it
    int32_t first = 0;     // window: nothing is left before it
  };
  struct Step {
    NodeId node;
    int32_t matched;
  };

  [[nodiscard]] int32_t num_windows() const { return static_cast<int32_t>(windows_.size()); }
  [[nodiscard]] bool is_window(int32_t component) const { return component >= 1 && component <= num_windows(); }
  [[nodiscard]] int32_t state_component() const { return has_states_ ? num_components_ - 1 : -1; }
  [[nodiscard]] int32_t lane_of(int32_t window) const { return full_lanes_ + window - 1; }
  [[nodiscard]] Node& at(NodeId node) { return nodes_[static_cast<size_t>(node)]; }
  [[nodiscard]] const Node& at(NodeId node) const { return nodes_[static_cast<size_t>(node)]; }
  [[nodiscard]] Part& part(NodeId node, int32_t component) {
    return parts_[static_cast<size_t>(node) * static_cast<size_t>(num_components_) + static_cast<size_t>(component)];
  }
  [[nodiscard]] const Part& part(NodeId node, int32_t component) const {
    return const_cast<RadixTree*>(this)->part(node, component);
  }
  [[nodiscard]] int32_t* lane(NodeId node, int32_t lane) {
    radix::Run& run = runs_[at(node).run];
    return runs_.lane(run, lane) + at(node).start;
  }
  [[nodiscard]] const int32_t* lane(NodeId node, int32_t lane) const {
    return const_cast<RadixTree*>(this)->lane(node, lane);
  }
  [[nodiscard]] int64_t window_start(int32_t window, int64_t end) const {
    return std::max<int64_t>(0, end - windows_[static_cast<size_t>(window - 1)]);
  }
  // Whether a component of the node is pinned: full by its path.
  [[nodiscard]] bool is_pinned(NodeId node, int32_t component) const {
    return (component == 0 ? at(node).path_pins : part(node, component).pins) > 0;
  }

  // radix_tree.cpp
  [[nodiscard]] NodeId find_child(NodeId parent, const radix::Query& query, int64_t block) const;
  [[nodiscard]] int32_t common_blocks(NodeId node, const radix::Query& query, int64_t block, int64_t limit) const;
  class Reuse;

  // radix_memory.cpp
  NodeId take_node() noexcept;
  void free_node(NodeId node) noexcept;
  void list_slices(const radix::Run& run);
  void place_slices(const radix::Run& run);
  void compact(radix::RunId run);
  void shrink() noexcept;
  void refit_nodes(size_t used);

  // radix_nodes.cpp: what keeps the structure whole; nothing here fails after reserve
  NodeId split(NodeId node, int32_t at);
  NodeId split_path(NodeId node, int64_t depth);
  NodeId add_leaf(NodeId parent, const radix::Query& query, int64_t first, radix::Run&& run);
  void remove_leaf(NodeId node);
  void trim(NodeId node, int32_t blocks);
  [[nodiscard]] bool is_empty(NodeId node) const;
  int64_t prune(NodeId node);
  void change_count(NodeId node, int32_t component, int32_t by);
  void refresh(NodeId node, int32_t component);
  void refresh_all(NodeId node);
  void link_after(NodeId node, NodeId previous, radix::RunId run);
  void unlink(NodeId node);

  // radix_locks.cpp
  void touch(NodeId node, int32_t component, bool is_hit);
  void pin_path(NodeId node, int32_t by, const radix::RetentionHint* hint);
  void pin(NodeId node, int32_t component, int32_t by, const radix::RetentionHint* hint);
  void pin_part(NodeId node, int32_t component, int32_t by, const radix::RetentionHint* hint);
  Receipt lock_end(NodeId node, uint32_t components, bool is_hit);
  void drop(Receipt& receipt, uint32_t components, const radix::RetentionHint& hint);

  // radix_insert.cpp
  void survey(const Offer& offer, NodeId parent, Inserted& out);
  void give_up_claims(const Inserted& out);
  void walk(const Offer& offer, NodeId parent, int64_t blocks, Inserted& out);
  void check_states(const Offer& offer, int64_t blocks) const;
  void claim(int32_t lane, int32_t id, int32_t least, Ids& taken);
  void claim_lane(const Offer& offer, int32_t lane, Inserted& out);
  void claim_states(const Offer& offer, Inserted& out);
  [[nodiscard]] int32_t state_after(int64_t blocks) const;
  void use_path(const Offer& offer);
  void fill_window(const Offer& offer, int32_t window);
  NodeId add_rest(const Offer& offer, const Inserted& out, NodeId parent, radix::Run&& run);
  void move_receipt(Receipt& receipt, NodeId end);

  // radix_extend.cpp
  [[nodiscard]] bool can_grow(NodeId node) const;
  void make_room(NodeId node, int64_t blocks);
  void grow(NodeId node, const Offer& offer, int32_t blocks);
  void inherit(NodeId node, NodeId from);
  void move_on(Receipt& receipt, NodeId end, int64_t old_end, int64_t pinned_end);
  void move_window(const Receipt& receipt, NodeId end, int32_t window, int64_t old_end, int64_t pinned_end);
  [[nodiscard]] bool can_join(NodeId upper, NodeId lower) const;
  void join(NodeId upper, NodeId lower);

  // radix_batch.cpp
  class Places;
  void check_places(std::span<const Offer> offers, std::span<Inserted> answers);
  void reserve_answer(const Offer& offer, Inserted& out) const;
  template <typename See>
  void see_places(const Offer& offer, int64_t blocks, See&& see) const;

  // radix_replace.cpp
  [[nodiscard]] NodeId node_with(NodeId node, int64_t block) const;

  // radix_evict.cpp
  void expire();
  int64_t evict_full(int64_t amount, std::vector<Ids>& out);
  int64_t evict_window(int32_t window, int64_t amount, std::vector<Ids>& out);
  int64_t evict_states(int64_t amount, std::vector<Ids>& out);
  void give_up_tail(NodeId node, int32_t blocks, std::vector<Ids>& out);

  // radix_check.cpp
  void check_node(NodeId node) const;
  void check_runs() const;
  void check_parts() const;
  void check_ids() const;

  int64_t block_size_;
  int32_t full_lanes_;
  std::vector<int64_t> windows_;  // in blocks
  bool has_states_;
  int64_t state_interval_;
  radix::Policy policy_;
  int32_t num_components_;
  radix::BlockHash hash_;

  std::vector<Node> nodes_;
  std::vector<Part> parts_;  // num_components_ for each node
  std::vector<NodeId> free_nodes_;
  size_t paid_looks_ = 0;  // at nodes, for shrink()
  radix::ChildMap map_;
  radix::Runs runs_;
  std::vector<radix::NodeHeap> heaps_;     // what can go, by component
  std::vector<radix::NodeHeap> expiries_;  // of those, what has a time to live
  std::vector<radix::HeldIds> held_ids_;   // by lane; the states come last
  std::vector<int64_t> evictable_;
  std::vector<int64_t> held_;
  std::vector<int32_t> space_children_;  // by namespace; -1: not in use
  std::vector<radix::NamespaceId> free_spaces_;
  std::vector<radix::NamespaceId> dead_;  // each once; it may have come to life again
  std::vector<uint8_t> is_listed_dead_;   // by namespace
  std::vector<Step> path_;                // scratch of insert
  std::vector<radix::Slice> slices_;      // scratch of compact
  int64_t num_receipts_ = 0;
  uint64_t turn_ = 0;
  double now_ = -radix::kNever;
};

}  // namespace pagecore
