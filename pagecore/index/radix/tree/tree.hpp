// Prefix cache: a radix tree from token prefixes to the blocks that hold their keys and values.
//
// The tree has nodes (NodeStore), an eviction order (EvictionQueues), receipts that pin nodes (Pins), the ids that it
// holds (Claims), namespaces (Namespaces) and a journal (TreeJournal). Structure splits and removes nodes, Branches
// marks states before branches, and Eviction takes ids; this class orchestrates them. It decides and frees nothing:
// calls return ids, and the caller owns the references.
//
// I1: a call that throws has changed nothing observable: checks, claims and memory come before the first change.
// I2: without full lanes, a node that nothing keeps is removed in the same call (prune).
// I3: nodes that one call touches lie on one path or have different turns, so that eviction keys never tie.
// Calls that are not inline are virtual, so that only the module that makes trees is linked with them.
// Cost: match O(tokens); lock and unlock O(nodes of the path); evict O(log n) a node. No recursion. Threads: one
// writer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pagecore/index/radix/nodes/namespaces.hpp"
#include "pagecore/index/radix/nodes/node_store.hpp"
#include "pagecore/index/radix/retention/claims.hpp"
#include "pagecore/index/radix/retention/eviction_queues.hpp"
#include "pagecore/index/radix/retention/pins.hpp"
#include "pagecore/index/radix/tree/branches.hpp"
#include "pagecore/index/radix/tree/eviction.hpp"
#include "pagecore/index/radix/tree/structure.hpp"
#include "pagecore/index/radix/tree/tree_journal.hpp"

namespace pagecore {

class RadixTree {
 public:
  using Ids = radix::Ids;
  using Inserted = radix::Inserted;
  using NodeId = radix::NodeId;
  using Offer = radix::Offer;
  using Receipt = radix::Receipt;
  using State = radix::State;

  struct Options {
    int64_t block_size = 16;
    int64_t full_lanes = 1;        // 0: nodes hold only tokens, for windows or states
    std::vector<int64_t> windows;  // in tokens
    std::vector<int64_t> chunks;   // of each window, in tokens; 0 for none, and empty for none at all
    std::vector<int64_t> sinks;    // of each window: first tokens that it also needs; as for chunks
    bool has_states = false;
    int64_t state_interval = 0;  // tokens between the states that a caller keeps
    int64_t min_kept = 0;        // blocks of a window that a node keeps while others have more
    radix::Policy policy = radix::Policy::Lru;
    double protected_share = 1;  // of the held ids, for Slru
  };
  struct Match {
    int64_t blocks = 0;       // reusable by every component
    int64_t full_blocks = 0;  // held by the full component
    NodeId full_node = radix::kNoNode;
    int32_t full_offset = 0;  // blocks of the node within the full prefix
    int64_t checkpoint = 0;   // tokens after which a new state would serve this prefix, or 0
    NodeId node = radix::kNoNode;
    int32_t offset = 0;  // blocks of the node within the reusable prefix
    int32_t state = radix::kNoState;
    // The prefix whose blocks can be shared: the full prefix in a tree with states and without windows, since layers
    // without a state need no more than its blocks; otherwise the reusable prefix.
    int64_t shared_blocks = 0;
    NodeId shared_node = radix::kNoNode;
    int32_t shared_offset = 0;
    // In a tree with states and windows: components whose blocks of the full prefix can be shared past the state. Those
    // of a window can if it has them all, and if what it needs at the end begins before the state.
    uint32_t ahead = 0;
  };
  // An offer of a batch, claimed.
  struct Prepared {
    Inserted answer;
    radix::NodeStorage storage;    // for the blocks that the tree lacks
    NodeId last = radix::kNoNode;  // of the path
    bool is_settled = false;       // no earlier offer of the batch changes the path or the answer
  };

  explicit RadixTree(const Options& options);
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;
  virtual ~RadixTree();

  // Namespaces. A new one is dropped with drop_namespace_if_empty() if nothing was inserted. A number is reused once
  // the caller has seen it in dead_namespace() and forgotten it.

  [[nodiscard]] radix::NamespaceId add_namespace() { return namespaces_.add(); }
  [[nodiscard]] radix::NamespaceId dead_namespace() noexcept { return namespaces_.next_dead(); }
  void forget_dead_namespace() noexcept { namespaces_.forget_dead(); }
  void drop_namespace_if_empty(radix::NamespaceId space) noexcept { namespaces_.drop_if_empty(space); }

  // Lookup. Changes nothing.

  // The longest reusable prefix, at most `limit` blocks; nothing for a namespace below 0, which the tree does not know.
  [[nodiscard]] virtual Match match(const radix::Query& query, int64_t limit) const;
  // The first out.size() ids of a match; in a window's lane, ids before the window are null.
  virtual void copy_blocks(NodeId node, int32_t offset, int32_t lane, std::span<int32_t> out) const;
  // The ids of the full prefix of a match in a lane of a component in `ahead`; of a window, null before what the prefix
  // up to the state needs.
  virtual void copy_ahead(const Match& match, int32_t lane, std::span<int32_t> out) const;
  // The last out.size() ids of the path that ends with `end`.
  virtual void copy_tail(NodeId end, int32_t lane, std::span<int32_t> out) const;
  // The id of one block of a path, counted from the start of the prefix.
  [[nodiscard]] virtual int32_t id_at(NodeId end, int64_t block, int32_t lane) const;
  // Pins that keep a block of a path from being evicted in a component; of a state, those of the node with the block.
  [[nodiscard]] virtual int32_t num_pins(NodeId end, int64_t block, int32_t component) const;
  // Blocks of the prefix of a receipt.
  [[nodiscard]] int64_t depth(NodeId end) const { return nodes_.end(end); }

  // Receipts. A match is valid until the tree changes, so it is locked once, but lock_ahead() follows lock_shared() of
  // the same match. In lock_all(), the locks of earlier matches may split the nodes of later ones.

  // Pins a match and counts the hit. Updates the node and offset of the match.
  [[nodiscard]] virtual Receipt lock(Match& match, uint32_t components);
  // lock() for several matches, in order. Without full lanes, lock() removes what it leaves empty, and with it the
  // nodes of other matches: lock_all() does so after the last one. Later locks may split the nodes of earlier matches,
  // which must not be used afterwards. If it throws, nothing has changed.
  virtual void lock_all(std::span<Match> matches, uint32_t components, std::span<Receipt* const> receipts);
  // Pins the shared prefix of a match instead, without the state, which counts as hit. A state that a sequence has read
  // is its own: evicting it from the tree takes nothing from the sequence. With `is_hit` false it is a use, and the hit
  // counts when count_hit() follows.
  [[nodiscard]] virtual Receipt lock_shared(Match& match, bool is_hit);
  // Counts a hit of the prefix of a receipt, and of the state after its first `state_blocks` blocks if the tree has it.
  virtual void count_hit(const Receipt& receipt, int64_t state_blocks);
  // Pins the full prefix of a match, and what windows have before its end. Holes are allowed: the caller is about to
  // fill them. It is not a hit.
  [[nodiscard]] virtual Receipt lock_full(Match& match);
  // Pins the components `ahead` of the full prefix of a match, after lock_shared() of the same match. It is not a hit.
  [[nodiscard]] virtual Receipt lock_ahead(Match& match);
  [[nodiscard]] virtual Receipt lock_again(const Receipt& receipt) noexcept { return pins_.lock_again(receipt); }
  virtual void unlock(Receipt& receipt, uint32_t components, const radix::RetentionHint& hint);
  // Reduces the prefix of the receipt to its first `blocks` blocks; 0 leaves a receipt of an empty prefix.
  virtual void shorten(Receipt& receipt, int64_t blocks) noexcept;

  // Insertions.

  // Adds what the tree lacks of an offer. `receipt`, if given, moves to the end of the offer.
  virtual void insert(const Offer& offer, Receipt* receipt, Inserted& out);
  // insert() for a sequence that continues past its receipt. Blocks before the end of the receipt are not compared
  // again. `query.space` is used only for an empty receipt. Marks and states are not supported here.
  virtual void extend(const Offer& offer, Receipt& receipt, Inserted& out);
  // insert() and extend() that return false instead of throwing, with nothing changed.
  [[nodiscard]] virtual bool try_insert(const Offer& offer, Receipt& receipt, Inserted& out) noexcept;
  [[nodiscard]] virtual bool try_extend(const Offer& offer, Receipt& receipt, Inserted& out) noexcept;
  // Checks every offer of a batch against the tree and the others, claims ids and reserves memory. Unless it throws,
  // the caller must call insert_prepared() for each offer, in this order, with no other call in between.
  virtual void prepare_all(std::span<const Offer> offers, std::vector<Prepared>& batch);
  virtual void insert_prepared(const Offer& offer, Receipt* receipt, Prepared& prepared) noexcept;
  // Replaces the id of a block by `id`, which may be null in a window; returns the old id.
  virtual int32_t replace_id(NodeId end, int64_t block, int32_t lane, int32_t id);

  // Eviction.

  // Evicts min(amount, evictable(component)) ids into `out`, by lane, states last; returns the number. Without full
  // lanes, evicting component 0 also counts nodes that are left empty. `time` is as for advance().
  virtual int64_t evict(int32_t component, int64_t amount, std::vector<Ids>& out, double time = -radix::kNever);
  // Evicts the end of a path, from its last cached block of the first `limit` back to `keep` blocks, until a block that
  // another path continues or a receipt pins. Returns the number of blocks; the ids go to `out` as with evict().
  virtual int64_t evict_path(const radix::Query& query, int64_t limit, int64_t keep, std::vector<Ids>& out);
  // Evicts everything that continues the first `valid` blocks of a query with its next block. Those of `receipts` that
  // cover the block are shortened to `valid` blocks first; what other receipts pin stays. Returns the number of blocks;
  // the ids go to `out` as with evict(). O(nodes of the tree).
  virtual int64_t revoke(const radix::Query& query, int64_t valid, std::span<Receipt* const> receipts,
                         std::vector<Ids>& out);
  // Evicts every path of a namespace, from its end until a block that a receipt pins. Returns the number of blocks; the
  // ids go to `out` as with evict(). O(nodes of the tree).
  virtual int64_t evict_namespace(radix::NamespaceId space, std::vector<Ids>& out);
  // Copies tokens and marks of the path that ends with a cached block, and returns its namespace; -1 if the lane has no
  // such block. O(ids of the tree).
  virtual radix::NamespaceId copy_path_of(int32_t lane, int32_t id, std::vector<int32_t>& tokens,
                                          std::vector<radix::Mark>& marks) const;
  // The node whose ids of a component the next evict() takes first; kNoNode if nothing is evictable.
  [[nodiscard]] virtual NodeId next_victim(int32_t component);
  // Ids of a component that evict() takes from a node before it takes any from another.
  [[nodiscard]] int32_t num_ids_to_take(NodeId node, int32_t component) const {
    if (components_.is_window(component)) return queues_.spare(node, component).count;
    return nodes_.part(node, component).count;
  }
  [[nodiscard]] int32_t state_of(NodeId node) const { return nodes_.at(node).state; }
  // Priority of a component of a node; one that has expired counts until next_victim() is called.
  [[nodiscard]] double priority_of(NodeId node, int32_t component) const {
    return nodes_.part(node, component).eviction.priority;
  }
  // Copies tokens, marks and ids, by lane, of the path that ends with a node; returns its namespace.
  virtual radix::NamespaceId copy_path(NodeId node, std::vector<int32_t>& tokens, std::vector<radix::Mark>& marks,
                                       std::vector<Ids>& ids) const;
  // Sets the caller's clock to the later of `time` and its current value.
  void advance(double time) { queues_.advance(time); }

  // Reservations, for callers whose own change must not fail half way. If one throws, nothing observable has changed.
  // unlock(), lock_again() and evict() of at most kReservedIds into `out` of reserve_evicted() never fail.

  static constexpr int64_t kReservedIds = 4096;
  // lock() and shorten() cannot fail afterwards while they make at most `nodes` nodes.
  virtual void reserve(int64_t nodes);
  // The most nodes that a lock() or shorten() makes.
  [[nodiscard]] int64_t nodes_to_move() const { return 2 + components_.num_cuts(); }
  void reserve_locks(int64_t count) { reserve(count * (1 + components_.num_cuts())); }
  // replace_id() of ids below `num_ids` cannot fail afterwards.
  void reserve_ids(int32_t lane, int32_t num_ids) { claims_.held(lane).reserve(num_ids); }
  virtual void reserve_evicted(std::vector<Ids>& out) const;

  // Journal, off by default. `roots` are the hashes of the namespaces by number; a namespace that is added later needs
  // set_root() before its first insertion. Blocks that the tree has are not in it: list_contents() returns them.

  virtual void start_journal(size_t max_bytes, std::vector<radix::ContentHash> roots);
  void stop_journal() noexcept { journal_.stop(); }
  [[nodiscard]] bool has_journal() const { return journal_.is_on(); }
  void set_root(radix::NamespaceId space, radix::ContentHash root) { journal_.set_root(space, root); }
  // Appends the roots that the changes since the last take_changes() name.
  void list_journal_roots(std::vector<radix::ContentHash>& out) const { journal_.list_roots(out); }
  // Moves the changes since the last call to `out`; none without a journal.
  virtual void take_changes(radix::Changes& out) noexcept;
  // Everything that the tree holds as stored records, parents before their children.
  virtual void list_contents(radix::Changes& out) const;

  // Sizes.

  // A prefix of `end` blocks needs blocks [first_needed, end) of a component to be reused.
  [[nodiscard]] int64_t first_needed(int32_t component, int64_t end) const {
    return components_.first_needed(component, end);
  }
  [[nodiscard]] int64_t evictable(int32_t component) const { return queues_.evictable(component); }
  [[nodiscard]] int64_t held(int32_t component) const { return queues_.held(component); }
  // Every id of a lane in ascending order; states for num_lanes().
  [[nodiscard]] virtual Ids held_ids(int32_t lane) const;
  [[nodiscard]] int32_t num_components() const { return components_.count(); }
  [[nodiscard]] int32_t num_lanes() const { return components_.num_lanes(); }
  [[nodiscard]] int64_t num_nodes() const { return nodes_.size(); }
  [[nodiscard]] int64_t num_receipts() const { return pins_.num_receipts(); }
  [[nodiscard]] virtual size_t nbytes() const;
  virtual void check_invariants() const;

 private:
  // tree.cpp
  void note_reuse(const Match& match);
  Receipt lock_end(NodeId end, uint32_t components, bool is_hit);
  Receipt lock_prefix(NodeId& node, int32_t& offset, int64_t blocks, uint32_t components, bool is_hit);
  Receipt pin_prefix(NodeId& node, int32_t& offset, int64_t blocks, uint32_t components, bool is_hit);

  // insert.cpp
  [[nodiscard]] int64_t nodes_to_insert(const Offer& offer) const {
    return 3 + static_cast<int64_t>(offer.states.size() + offer.ranges.size()) + components_.num_cuts();
  }
  void check_namespace(radix::NamespaceId space) const;
  void survey(const Offer& offer, NodeId parent, Inserted& out, radix::Suspects* suspects = nullptr);
  void commit(const Offer& offer, Receipt* receipt, const Inserted& out, radix::NodeStorage&& storage);
  void cut_path();
  NodeId add_rest(const Offer& offer, const Inserted& out, NodeId parent, radix::NodeStorage&& storage);
  void fill_window(const Offer& offer, int32_t window);
  void value_ranges(const Offer& offer, const Inserted& out, NodeId end);
  void add_state(NodeId end, const State& state, const radix::RetentionHint& hint);
  void move_receipt(Receipt& receipt, NodeId end);

  // extend.cpp
  void grow(NodeId leaf, const Offer& offer, int32_t blocks);
  void move_on(Receipt& receipt, NodeId end, int64_t old_end, int64_t pinned_end);

  // evict.cpp
  int64_t take_unpinned(std::span<const NodeId> subtree, std::vector<Ids>& out);
  void shrink() noexcept;

  // batch.cpp
  void claim_all(std::span<const Offer> offers, std::span<Prepared> batch);
  void check_suspects(std::span<const Offer> offers, std::span<const Prepared> batch, radix::Suspects& suspects);
  void settle(std::span<const Offer> offers, std::span<Prepared> batch) const;
  void reserve_all(std::span<const Offer> offers, std::span<Prepared> batch);

  radix::NodeStore nodes_;
  const radix::Components& components_ = nodes_.components();
  radix::EvictionQueues queues_;
  radix::Pins pins_{nodes_, queues_};
  radix::Claims claims_{nodes_};
  radix::Namespaces namespaces_;
  radix::Structure structure_{nodes_, queues_, namespaces_};
  radix::Branches branches_{nodes_, queues_};
  radix::TreeJournal journal_{nodes_};
  radix::Eviction eviction_{nodes_, queues_, claims_, structure_, branches_, journal_};
  int64_t state_interval_;
  radix::Path path_;  // scratch of insertions
};

}  // namespace pagecore
