// Planted faults inside a radix tree: check_invariants() must report each.
#include <vector>

#include "pagecore/index/radix/tree/tree.hpp"
#include "tests/index/native/radix_reach.hpp"
#include "tests/native/harness.hpp"

#if defined(__SANITIZE_ADDRESS__)

using namespace pagecore;
using namespace pagecore::test;

namespace {

REACH(Store, RadixTree, nodes_)
REACH(Queues, RadixTree, queues_)
REACH(TreeClaims, RadixTree, claims_)
REACH(TreeNamespaces, RadixTree, namespaces_)
REACH(Map, radix::NodeStore, map_)
REACH(Storages, radix::NodeStore, storages_)
REACH(Components, radix::EvictionQueues, queues_)
REACH(NumChildren, radix::Namespaces, num_children_)
REACH(HeapEntries, radix::NodeHeap, entries_)

// Tree with two prefixes of six blocks that share three, a window of two blocks, and two states; a receipt pins the
// first four blocks in every component.
class FaultyTree {
 public:
  FaultyTree() : tree_(options()) {
    insert({1, 2, 3, 4, 5, 6}, 10, 4);
    insert({1, 2, 3, 7, 8, 9}, 20, 6);
    const std::vector<int32_t> tokens{1, 2, 3, 4};
    RadixTree::Match match = tree_.match({tokens, {}, 0}, 4);
    receipt = tree_.lock(match, 7);
    tree_.check_invariants();
  }

  template <typename Tag>
  auto& get(Tag tag) {
    return tree_.*reached(tag);
  }
  radix::NodeStore& nodes() { return get(Store{}); }
  radix::ChildMap& map() { return nodes().*reached(Map{}); }
  radix::NodeStorage& storage_of(radix::NodeId node) {
    return (nodes().*reached(Storages{}))[nodes().at(node).storage];
  }
  auto& component(size_t index) { return (get(Queues{}).*reached(Components{}))[index]; }
  radix::HeldIds& held(int32_t lane) { return get(TreeClaims{}).held(lane); }
  // The node of the receipt is pinned in every component; leaf() is not pinned.
  radix::Node& pinned_node() { return nodes().at(receipt.node); }
  radix::Part& pinned_part(int32_t component) { return nodes().part(receipt.node, component); }
  radix::NodeId leaf() { return component(0).queue.top(); }
  radix::Node& leaf_node() { return nodes().at(leaf()); }
  radix::Part& leaf_part(int32_t component) { return nodes().part(leaf(), component); }

  void check() { tree_.check_invariants(); }

  RadixTree tree_;
  RadixTree::Receipt receipt;

 private:
  static RadixTree::Options options() {
    RadixTree::Options options;
    options.block_size = 1;
    options.windows = {2};
    options.has_states = true;
    options.state_interval = 1;
    options.policy = radix::Policy::Priority;
    return options;
  }
  void insert(const std::vector<int32_t>& tokens, int32_t first, int64_t state_after) {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < tokens.size(); ++i) ids.push_back(first + static_cast<int32_t>(i));
    const RadixTree::State state{state_after, first};
    RadixTree::Inserted out;
    tree_.insert({{tokens, {}, 0}, {ids.data(), ids.data()}, {&state, 1}, {}, 0}, nullptr, out);
  }
};

}  // namespace

// `report` is part of the message of the exception that ends the process.
#define PLANT(name, report, fault) \
  PC_PLANT(name, report) {         \
    FaultyTree tree;               \
    fault;                         \
    tree.check();                  \
  }

PLANT(tree_wrong_pin_count, "path_pins == nodes_.at(node).receipts", ++tree.pinned_node().path_pins)
PLANT(tree_forgotten_receipt, "path_pins == nodes_.at(node).receipts", --tree.pinned_node().receipts)
PLANT(tree_wrong_window_pins, "nodes_.part(node, c).pins == pins", ++tree.leaf_part(1).pins)
PLANT(tree_window_receipt_lost, "nodes_.part(node, c).pins == pins", tree.pinned_part(1).receipts = 0)
PLANT(tree_state_receipt_lost, "nodes_.part(node, c).pins == pins", tree.pinned_part(2).receipts = 0)
PLANT(tree_lost_heap_entry, "queue.holds(node) == can_go", tree.component(0).queue.erase(tree.leaf()))
PLANT(tree_pinned_node_in_heap, "queue.holds(node) == can_go", tree.component(1).queue.put(tree.receipt.node, {}))
PLANT(tree_stale_heap_key, "!(queue.key(node) < key)", tree.leaf_part(0).eviction.used += 9)
PLANT(tree_heap_out_of_order, "i == 0 || !(entries_[i].key < entries_[parent(i)].key)",
      (tree.component(0).queue.*reached(HeapEntries{})).front().key.turn += 99)
PLANT(tree_wrong_evictable, "num_evictable == evictable", ++tree.component(0).evictable)
PLANT(tree_wrong_held, "num_held == held", --tree.component(1).held)
PLANT(tree_id_not_noted, "ids.size()) == held(i).count()", tree.held(0).erase(12))
PLANT(tree_id_noted_that_is_gone, "ids.size()) == held(i).count()", static_cast<void>(tree.held(2).add(99)))
PLANT(tree_another_id_noted, "held(i).holds(id)", tree.held(1).erase(12); static_cast<void>(tree.held(1).add(99)))
PLANT(tree_wrong_count_of_children, "nodes_[i].children == children[i]", ++tree.leaf_node().children)
PLANT(tree_wrong_depth, "it.depth == ", ++tree.leaf_node().depth)
PLANT(tree_child_lost_in_map, "map_.find(it.hash", tree.map().erase(tree.leaf_node().hash, tree.leaf()))
PLANT(tree_child_under_another_hash, "it.hash == hash_", tree.leaf_node().hash ^= 1)
PLANT(tree_wrong_tokens, "it.hash == hash_",
      ++tree.storage_of(tree.leaf()).data[static_cast<size_t>(tree.leaf_node().start)])
PLANT(tree_wrong_live_blocks, "live == storage.live", --tree.storage_of(tree.leaf()).live)
PLANT(tree_window_count, "part(node, w).count == ", --tree.leaf_part(1).count)
PLANT(tree_holes_said_where_ids_are, "std::count(ids, ids + first, kNullBlock) == first", tree.leaf_part(1).first = 1)
PLANT(tree_state_count, "part(node, components_.state()).count == ", tree.leaf_node().state = 77)
PLANT(tree_namespace_count, "num_children[i] == std::max(0, num_children_[i])",
      ++(tree.get(TreeNamespaces{}).*reached(NumChildren{}))[0])
PLANT(tree_expiry_not_in_its_heap, "expiries.holds(node)", tree.leaf_part(0).eviction.expiry = 5)

PC_PLANT(tree_reads_past_the_tokens, "AddressSanitizer: heap-buffer-overflow") {
  FaultyTree tree;
  const Exact<int32_t> tokens(std::vector<int32_t>{1, 2, 3});
  const radix::Query longer{{tokens.data(), 4}, {}, 0};
  static_cast<void>(tree.tree_.match(longer, 4));
}

PC_PLANT(tree_reads_past_the_ids, "AddressSanitizer: heap-buffer-overflow") {
  FaultyTree tree;
  const std::vector<int32_t> tokens{5, 5, 5, 5};
  const Exact<int32_t> ids(std::vector<int32_t>{30, 31, 32});
  RadixTree::Inserted out;
  tree.tree_.insert({{tokens, {}, 0}, {ids.data(), ids.data()}, {}, {}, 0}, nullptr, out);
}

PC_PLANT(tree_writes_past_the_blocks, "AddressSanitizer: heap-buffer-overflow") {
  FaultyTree tree;
  Exact<int32_t> blocks(3);
  tree.tree_.copy_blocks(tree.receipt.node, 1, 0, {blocks.data(), 4});
}

#endif
