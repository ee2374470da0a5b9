// Nodes of the tree: their records, their links, and the storage of their blocks.
//
//   namespace ── A [blocks 0..12) ─┬─ B [12..16)      depth(A) = 0, end(A) = 12 = depth(B) = depth(C)
//                                  └─ C [12..64)      children differ in their first block
//
//   split(C, 20)   A ── C' [12..32) ── C [32..64)     the upper half is new, the lower half keeps the id, and with it
//                                                     children, receipts and state
//
// I1: depth is the end of the parent, 0 at the top; `children` counts the nodes that name this one as parent.
// I2: the child map has each node once, under the hash of its parent and its first block.
// I3: `count` of a component is the number of ids that it has in the node: blocks (full), non-null ids (window), 0 or
//     1 (state). Before `first`, a window has no ids.
// I4: without full lanes an unpinned leaf has an id in a window, or a state.
// States: free -> live (add_leaf, split) -> free (remove_leaf, join).
// The records hold eviction states and pins, which EvictionQueues and Pins maintain; a change of `count` or of children
// that is made here must be reported to EvictionQueues by the caller.
// Cost: find_child O(block_size); split and join O(components), O(blocks) for a window with holes.
// Nothing fails after reserve(), except make_storage() and make_room(). Threads: one writer.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "pagecore/index/radix/nodes/child_map.hpp"
#include "pagecore/index/radix/nodes/components.hpp"
#include "pagecore/index/radix/nodes/node_storage.hpp"
#include "pagecore/index/radix/nodes/policy.hpp"

namespace pagecore::radix {

struct Node {
  NodeId parent = kNoNode;  // top_of(namespace) at the top
  StorageId storage = 0;
  int32_t start = 0;                          // in the storage, in blocks
  int32_t size = 0;                           // in blocks; 0: free
  int32_t depth = 0;                          // blocks before it
  NodeId previous = kNoNode, next = kNoNode;  // slices of its storage
  uint32_t hash = 0;
  int32_t children = 0;
  int32_t receipts = 0;   // that end here
  int32_t path_pins = 0;  // receipts that end here + pinned children
  int32_t state = kNoState;
};

// One component of a node.
struct Part {
  EvictionState eviction;
  int32_t count = 0;     // ids, see I3
  int32_t pins = 0;      // window or state: receipts that hold it here
  int32_t receipts = 0;  // window or state: receipts that end here and hold it
  int32_t first = 0;     // window: index before which all ids are null
};

// The nodes that a query shares with the tree, in order. All but the last are matched in full.
struct PathStep {
  NodeId node;
  int32_t matched;  // blocks
};
struct Path {
  std::vector<PathStep> steps;
  int64_t start = 0;  // in blocks of the query
  int64_t end = 0;

  [[nodiscard]] NodeId last() const { return steps.empty() ? kNoNode : steps.back().node; }
};

class NodeStore {
 public:
  NodeStore(Components components, uint64_t seed);

  // Records.

  [[nodiscard]] const Components& components() const { return components_; }
  [[nodiscard]] int64_t size() const { return map_.size(); }
  // Ids run from 0 to num_ids() - 1.
  [[nodiscard]] NodeId num_ids() const { return static_cast<NodeId>(nodes_.size()); }
  [[nodiscard]] Node& at(NodeId node) { return nodes_[static_cast<size_t>(node)]; }
  [[nodiscard]] const Node& at(NodeId node) const { return nodes_[static_cast<size_t>(node)]; }
  [[nodiscard]] Part& part(NodeId node, int32_t component) {
    return parts_[static_cast<size_t>(node) * num_components_ + static_cast<size_t>(component)];
  }
  [[nodiscard]] const Part& part(NodeId node, int32_t component) const {
    return const_cast<NodeStore*>(this)->part(node, component);
  }
  [[nodiscard]] int32_t* lane(NodeId node, int32_t lane) {
    return storages_.lane(storages_[at(node).storage], lane) + at(node).start;
  }
  [[nodiscard]] const int32_t* lane(NodeId node, int32_t lane) const {
    return const_cast<NodeStore*>(this)->lane(node, lane);
  }
  [[nodiscard]] const int32_t* tokens(NodeId node, int32_t place) const {
    return storages_.tokens(at(node).storage, int64_t{at(node).start} + place);
  }
  // Marks of the storage of a node.
  [[nodiscard]] std::span<const Mark> marks(NodeId node) const { return storages_[at(node).storage].marks; }
  // Content hash of a block, in a tree with a journal.
  [[nodiscard]] uint64_t hash(NodeId node, int32_t place) const {
    const uint64_t low = static_cast<uint32_t>(lane(node, components_.num_lanes())[place]);
    const uint64_t high = static_cast<uint32_t>(lane(node, components_.num_lanes() + 1)[place]);
    return high << 32 | low;
  }
  void set_hash(NodeId node, int32_t place, uint64_t hash) {
    lane(node, components_.num_lanes())[place] = static_cast<int32_t>(static_cast<uint32_t>(hash));
    lane(node, components_.num_lanes() + 1)[place] = static_cast<int32_t>(static_cast<uint32_t>(hash >> 32));
  }
  // Live nodes, parents before their children.
  [[nodiscard]] std::vector<NodeId> by_depth() const;
  // Blocks of the prefix that ends with the node; 0 for a namespace.
  [[nodiscard]] int64_t end(NodeId node) const { return node < 0 ? 0 : int64_t{at(node).depth} + at(node).size; }
  // The full component is pinned by the path, every other component by its own receipts.
  [[nodiscard]] int32_t pins(NodeId node, int32_t component) const {
    return component == 0 ? at(node).path_pins : part(node, component).pins;
  }
  // True if nothing keeps a node of a tree without full lanes.
  [[nodiscard]] bool is_empty(NodeId node) const { return components_.full_lanes == 0 && has_nothing(node); }

  // Lookup.

  [[nodiscard]] NodeId find_child(NodeId parent, const Query& query, int64_t block) const;
  // The number of leading blocks that the node and blocks [block, limit) of the query have in common.
  [[nodiscard]] int32_t common_blocks(NodeId node, const Query& query, int64_t block, int64_t limit) const;
  // Follows blocks [end(parent), blocks) of the query down from `parent`.
  void walk(const Query& query, NodeId parent, int64_t blocks, Path& path) const;
  // Sets `path` to the first `end` blocks of the path that `last`, or a node that was split off it, ends: what walk()
  // found before nodes were split.
  void retrace(NodeId last, int64_t end, Path& path) const;
  // Hash of the child of `parent` that would hold a block of the query.
  [[nodiscard]] uint32_t child_hash(NodeId parent, const Query& query, int64_t block) const {
    const int32_t* const tokens = query.tokens.data() + block * components_.block_size;
    return hash_(parent, tokens, components_.block_size, query.marks, block);
  }
  // The node that has a block of the path that ends with `node`; ShapeError if the path has no such block.
  [[nodiscard]] NodeId node_with(NodeId node, int64_t block) const;
  // Copies tokens and marks of the path that ends with a node, from the start of its prefix; returns the namespace.
  NamespaceId copy_path(NodeId node, std::vector<int32_t>& tokens, std::vector<Mark>& marks) const;
  // The state after `blocks` blocks of a path, or kNoState.
  [[nodiscard]] int32_t state_after(const Path& path, int64_t blocks) const;

  // Memory.

  // The capacity that reserve(nodes) will grow to; 0 if there is room for `nodes` more nodes.
  [[nodiscard]] size_t growth(int64_t nodes) const {
    return nodes <= static_cast<int64_t>(free_.size()) ? 0 : growth_past_free(nodes);
  }
  void reserve(int64_t nodes, size_t storages = 1);
  [[nodiscard]] size_t capacity() const { return nodes_.capacity(); }
  [[nodiscard]] NodeStorage make_storage(const Query& query, int64_t first, int64_t count,
                                         NodeStorage* spare = nullptr) {
    return storages_.make(query, first, count, spare);
  }
  [[nodiscard]] int32_t* lane_of(NodeStorage& storage, int32_t lane) const { return storages_.lane(storage, lane); }
  // Adds lanes for content hashes to every storage, now and later; changes nothing if they are there.
  void add_hash_lanes() { storages_.widen(components_.num_lanes() + kHashLanes); }
  // Makes room for `blocks` more blocks after a leaf.
  void make_room(NodeId leaf, int64_t blocks);
  // Returns memory if at most half of the ids are live; ids of live nodes stay. Returns false if it was too early to
  // look: a look costs O(ids), which is amortised over removed nodes and calls.
  bool shrink() noexcept;

  // Changes.

  // `parent` is a node or a namespace; `first` is its end.
  NodeId add_leaf(NodeId parent, const Query& query, int64_t first, NodeStorage&& storage);
  // Makes a node of the leading `blocks` of a node, 0 < blocks < size, and returns it.
  NodeId split(NodeId node, int32_t blocks);
  // Removes a leaf that holds no pins and no ids; returns its parent.
  NodeId remove_leaf(NodeId leaf);
  // Removes the last `blocks` blocks of a leaf, whose ids were taken already.
  void trim(NodeId leaf, int32_t blocks);
  // Appends blocks [end(leaf), end(leaf) + blocks) of a query to a leaf with room for them; counts of windows stay.
  void append(NodeId leaf, const Query& query, std::span<const int32_t* const> lanes, int32_t blocks);
  // True if the boundary between a node and its parent serves no purpose: both are slices of one storage, and the same
  // receipts pin them.
  [[nodiscard]] bool can_join(NodeId upper, NodeId lower) const;
  // The inverse of split(): the lower node keeps its id and takes over the start and the eviction states of the upper.
  void join(NodeId upper, NodeId lower);

  // Nodes at the top of each of `count` namespaces.
  [[nodiscard]] std::vector<int32_t> count_tops(size_t count) const;
  [[nodiscard]] size_t nbytes() const;
  void check_invariants() const;

 private:
  [[nodiscard]] bool has_nothing(NodeId node) const;
  [[nodiscard]] size_t growth_past_free(int64_t nodes) const;
  NodeId take() noexcept;
  void release(NodeId node) noexcept;
  void link_after(NodeId node, NodeId previous, StorageId storage);
  void unlink(NodeId node);
  void compact(StorageId id);
  void list_slices(const NodeStorage& storage);
  void place_slices(const NodeStorage& storage);
  void refit(size_t used);
  void check_node(NodeId node) const;
  void check_storages() const;

  const Components components_;
  const size_t num_components_;
  BlockHash hash_;
  std::vector<Node> nodes_;
  std::vector<Part> parts_;  // num_components_ for each node
  std::vector<NodeId> free_;
  size_t paid_looks_ = 0;  // nodes that shrink() may look at
  ChildMap map_;
  StoragePool storages_;
  std::vector<Slice> slices_;  // scratch of compact() and make_room()
};

}  // namespace pagecore::radix
