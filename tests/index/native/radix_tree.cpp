// RadixTree against its model: every component and policy, namespaces, marks, batches, invalid offers, and allocation
// failures.
#include <numeric>

#include "tests/index/native/radix_life.hpp"
#include "tests/index/native/radix_reach.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

REACH(Nodes, RadixTree, nodes_)
REACH(Hash, radix::NodeStore, hash_)

// Seed for which the hash of a block ignores its parent and is equal for many blocks.
constexpr uint64_t kWeakSeed = 0x9E3779B97F4A7C15u;

Ids count_from(int32_t first, size_t count) {
  Ids ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

// Tree with three windows, one long prefix and `leaves` short ones, so that nodes and child map have every fill level.
class CrowdedTree {
 public:
  CrowdedTree(int32_t leaves, bool has_states) : tree_(options(has_states)) {
    for (int32_t leaf = 0; leaf < leaves; ++leaf) insert({1000 + leaf}, 1000 + leaf, {}, nullptr);
    insert(count_from(0, 30), 1, {}, nullptr);
  }

  RadixTree::Receipt lock(const Tokens& tokens) {
    RadixTree::Match match = tree_.match({tokens, {}, 0}, std::ssize(tokens));
    return tree_.lock(match, 15);
  }
  void insert(const Tokens& tokens, int32_t first, const std::vector<RadixTree::State>& states,
              RadixTree::Receipt* receipt) {
    const Ids ids = count_from(first, tokens.size());
    RadixTree::Inserted out;
    tree_.insert({{tokens, {}, 0}, {ids.data(), ids.data(), ids.data(), ids.data()}, states, {}, 0}, receipt, out);
  }
  void extend(const Tokens& tokens, RadixTree::Receipt& receipt) {
    const Ids ids = count_from(500, tokens.size());
    RadixTree::Inserted out;
    tree_.extend({{tokens, {}, 0}, {ids.data(), ids.data(), ids.data(), ids.data()}, {}, {}, 0}, receipt, out);
  }

  int64_t revoke(const Tokens& tokens, int64_t valid) {
    RadixTree::Receipt* const receipts[] = {&long_};
    std::vector<Ids> out;
    return tree_.revoke({tokens, {}, 0}, valid, receipts, out);
  }

  RadixTree tree_;
  RadixTree::Receipt long_;  // of the long prefix

 private:
  static RadixTree::Options options(bool has_states) {
    RadixTree::Options options;
    options.block_size = 1;
    options.windows = {3, 7, 11};
    options.has_states = has_states;
    options.state_interval = 1;
    return options;
  }
};

// Runs `act` for every number of nodes and of successful allocations: it succeeds, or fails and changes nothing.
template <typename Act>
void with_any_memory(bool has_states, Act&& act) {
  for (int32_t leaves = 0; leaves < 90; ++leaves) {
    bool is_done = false;
    for (int64_t allocations = 0; !is_done; ++allocations) {
      CrowdedTree crowded(leaves, has_states);
      RadixTree::Receipt receipt = crowded.lock({});
      crowded.long_ = crowded.lock(count_from(0, 29));  // leaves less spare memory than its splits took
      const int64_t nodes = crowded.tree_.num_nodes();
      try {
        const ShortMemory memory(allocations);
        act(crowded, receipt);
        is_done = true;
      } catch (const std::bad_alloc&) {
        PC_CHECK(crowded.tree_.num_nodes() == nodes, crowded.tree_.num_nodes(), " nodes");
      }
      crowded.tree_.check_invariants();
    }
  }
}

// Runs two rounds; the second starts with returned memory.
void live_twice(TreeLife& life) {
  for (const int steps : {70, 20}) {
    for (int i = 0; i < steps; ++i) life.step();
    life.end();
  }
}

}  // namespace

PC_TEST(tree_behaves_as_its_model) {
  rounds(300, [](Random& random) {
    TreeLife life(random, some_options(random), false);
    live_twice(life);
  });
}

PC_TEST(tree_distinguishes_prefixes_with_equal_hashes) {
  const Tokens tokens{1, 2, 3, 4};
  const radix::BlockHash weak(kWeakSeed);
  PC_CHECK(weak(1, tokens.data(), 4, {}, 0) == weak(2, tokens.data(), 4, {}, 0), "the seed is no longer weak");
  rounds(100, [&](Random& random) {
    TreeLife life(random, some_options(random), false);
    (life.tree().*reached(Nodes{})).*reached(Hash{}) = weak;
    live_twice(life);
  });
}

PC_TEST(tree_changes_nothing_when_memory_runs_out) {
  rounds(150, [](Random& random) {
    TreeLife life(random, some_options(random), true);
    live_twice(life);
  });
}

PC_TEST(tree_takes_all_memory_before_it_splits) {
  const Tokens tokens = count_from(0, 20);
  Tokens astray = count_from(0, 26);
  std::fill(astray.begin() + 20, astray.end(), -1);
  with_any_memory(false, [&](CrowdedTree& tree, RadixTree::Receipt&) { tree.lock(tokens); });
  with_any_memory(true, [&](CrowdedTree& tree, RadixTree::Receipt& receipt) {
    tree.insert(astray, 500, {{2, 1}, {4, 2}, {6, 3}, {8, 4}}, &receipt);
  });
  with_any_memory(false, [&](CrowdedTree& tree, RadixTree::Receipt& receipt) { tree.extend(astray, receipt); });
  with_any_memory(false, [&](CrowdedTree& tree, RadixTree::Receipt&) {
    PC_CHECK(tree.revoke(tokens, 17) == 30 - 17, "a revoked block stays");
    PC_CHECK(tree.tree_.depth(tree.long_.node) == 17, "the receipt ends elsewhere");
  });
}

PC_TEST(tree_shortens_a_receipt_that_is_listed_twice) {
  RadixTree::Options options;
  options.block_size = 1;
  RadixTree tree(options);
  const Tokens tokens = count_from(0, 8);
  const Ids ids = count_from(1, 8);
  RadixTree::Inserted inserted;
  tree.insert({{tokens, {}, 0}, {ids.data()}, {}, {}, 0}, nullptr, inserted);
  RadixTree::Match match = tree.match({tokens, {}, 0}, 8);
  RadixTree::Receipt receipt = tree.lock(match, 1);
  RadixTree::Receipt* const receipts[] = {&receipt, &receipt};  // it moves to a node that is split off
  std::vector<Ids> out;
  PC_CHECK(tree.revoke({tokens, {}, 0}, 5, receipts, out) == 3, "revoked blocks stay");
  PC_CHECK(tree.depth(receipt.node) == 5, "the receipt ends elsewhere");
  tree.check_invariants();
}

PC_TEST(tree_refuses_namespaces_that_are_not_in_use) {
  RadixTree::Options options;
  options.block_size = 1;
  RadixTree tree(options);
  const radix::NamespaceId freed = tree.add_namespace();
  tree.drop_namespace_if_empty(freed);
  PC_CHECK(tree.dead_namespace() == freed, "the namespace is in use");
  tree.forget_dead_namespace();
  const Tokens tokens = count_from(0, 8);
  const Ids ids = count_from(1, 8);
  RadixTree::Inserted inserted;
  std::vector<RadixTree::Prepared> prepared;
  for (const radix::NamespaceId space : {-1, -2, INT32_MIN, freed, freed + 1, INT32_MAX}) {
    const RadixTree::Offer offer{{tokens, {}, space}, {ids.data()}, {}, {}, 0};
    PC_REFUSES(UnsupportedOption, tree.insert(offer, nullptr, inserted));
    const RadixTree::Offer offers[] = {{{tokens, {}, 0}, {ids.data()}, {}, {}, 0}, offer};
    PC_REFUSES(UnsupportedOption, tree.prepare_all(offers, prepared));
    tree.check_invariants();
  }
  PC_CHECK(tree.num_nodes() == 0 && tree.held_ids(0).empty(), "a refused insertion has left something");
}

PC_TEST(tree_refuses_impossible_sizes) {
  RadixTree::Options options;
  const auto refused_with = [&](int64_t& option, int64_t wrong) {
    const int64_t right = option;
    option = wrong;
    PC_REFUSES(ShapeError, RadixTree{options});
    option = right;
  };
  options.windows = {4, 4};
  options.has_states = true;
  options.state_interval = 16;
  for (const int64_t wrong : {int64_t{0}, int64_t{-1}, int64_t{1} << 31, INT64_MAX, INT64_MIN}) {
    for (int64_t* option : {&options.block_size, &options.windows[1], &options.state_interval})
      refused_with(*option, wrong);
    if (wrong != 0) refused_with(options.full_lanes, wrong);
  }
  refused_with(options.state_interval, 24);
  refused_with(options.min_kept, -1);
  refused_with(options.min_kept, int64_t{1} << 31);
  options.windows.assign(17, 4);
  PC_REFUSES(ShapeError, RadixTree{options});
  options.windows.clear();
  options.has_states = false;
  refused_with(options.full_lanes, 0);
}
