// A RadixTree and its model, and the comparisons of what can be observed of both.
#pragma once

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "tests/index/native/model_pool.hpp"
#include "tests/index/native/radix_offers.hpp"

namespace pagecore::test {

class ComparedTree {
 public:
  explicit ComparedTree(const RadixTree::Options& options) : model_(options), tree_(options) {}
  ComparedTree(const ComparedTree&) = delete;
  ComparedTree& operator=(const ComparedTree&) = delete;

  [[nodiscard]] RadixTree& tree() { return tree_; }

  void same() {
    tree_.check_invariants();
    if (tree_.has_journal()) same_journal();
    PC_CHECK(tree_.num_receipts() == std::ssize(model_.receipts), tree_.num_receipts(), " receipts");
    for (size_t c = 0; c < model_.num_components; ++c) {
      const auto component = static_cast<int32_t>(c);
      PC_CHECK(tree_.held(component) == model_.held(c), "component ", c, " holds ", tree_.held(component));
      PC_CHECK(tree_.evictable(component) == model_.evictable(c), tree_.evictable(component), " of component ", c,
               " can go, expected ", model_.evictable(c));
    }
    const std::vector<std::set<int>> pinned = model_.all_pinned();
    for (const auto& [name, held] : receipts_) {
      const RadixTree::Receipt& receipt = held.receipt;
      const ModelReceipt& known = model_.receipts.at(name);
      PC_CHECK(tree_.depth(receipt.node) == std::ssize(model_.path(known.end)), "receipt ", name, " ends elsewhere");
      PC_CHECK(receipt.components == known.components, "receipt ", name, " holds ", receipt.components);
      same_path(receipt, known, pinned);
    }
    for (size_t lane = 0; lane <= model_.num_lanes; ++lane) {
      const std::set<int32_t> ids = model_.held_ids(lane);
      PC_CHECK(tree_.held_ids(static_cast<int32_t>(lane)) == Ids(ids.begin(), ids.end()), "lane ", lane);
    }
    std::set<int32_t> used;
    for (const auto& [name, root] : model_.roots) used.insert(name);
    for (const auto& [name, space] : spaces_) PC_CHECK(used.contains(name), "namespace ", name, " is dead");
    PC_CHECK(std::ssize(used) - used.contains(0) == std::ssize(spaces_), spaces_.size(), " namespaces");
  }

  // The ids and pins of every block that a receipt holds.
  void same_path(const RadixTree::Receipt& receipt, const ModelReceipt& known,
                 const std::vector<std::set<int>>& pinned) {
    const std::vector<int> path = model_.path(known.end);
    for (size_t i = 0; i < path.size(); ++i) {
      const auto block = static_cast<int64_t>(i);
      for (size_t lane = 0; lane < model_.num_lanes; ++lane) {
        const int32_t id = tree_.id_at(receipt.node, block, static_cast<int32_t>(lane));
        PC_CHECK(id == model_.id_at(path[i], lane), "lane ", lane, " has id ", id, " at block ", i);
      }
      for (size_t c = 0; c < model_.num_components; ++c) {
        if (model_.is_state(c) && model_.cells.at(path[i]).state == radix::kNoState) continue;
        const bool is_pinned = tree_.num_pins(receipt.node, block, static_cast<int32_t>(c)) > 0;
        PC_CHECK(is_pinned == pinned[c].contains(path[i]), "component ", c, " of block ", i, " is ",
                 is_pinned ? "" : "not ", "pinned");
      }
    }
  }

 protected:
  struct Held {
    RadixTree::Receipt receipt;
    int32_t name = 0;  // of its namespace
  };

  // Namespaces, handled as in the binding.

  [[nodiscard]] radix::NamespaceId space_of(int32_t name) const {
    if (name == 0) return 0;
    return spaces_.contains(name) ? spaces_.at(name) : -1;
  }
  void bury() {
    for (radix::NamespaceId gone = tree_.dead_namespace(); gone >= 0; gone = tree_.dead_namespace()) {
      const size_t before = spaces_.size();
      std::erase_if(spaces_, [&](const auto& each) { return each.second == gone; });
      PC_CHECK(spaces_.size() == before - 1, "namespace ", gone, " was not in use");
      tree_.forget_dead_namespace();
    }
  }

  void add_space(int32_t name) {
    spaces_[name] = -1;
    try {
      spaces_[name] = tree_.add_namespace();
    } catch (...) {
      spaces_.erase(name);
      throw;
    }
  }

  // Results.

  void same_ids(const RadixTree::Match& match, const ModelMatch& expected) {
    for (size_t lane = 0; lane < model_.num_lanes && match.blocks > 0; ++lane) {
      Exact<int32_t> ids(static_cast<size_t>(match.blocks));
      ids.fill(-7);
      tree_.copy_blocks(match.node, match.offset, static_cast<int32_t>(lane), ids.span());
      PC_CHECK(ids.copy() == expected.ids[lane], "lane ", lane, ": ", shown(ids.copy()), ", expected ",
               shown(expected.ids[lane]));
    }
  }

  void same_inserted(const ModelOffer& offer, const RadixTree::Inserted& out, const ModelTree::Inserted& expected) {
    PC_CHECK(out.blocks == std::ssize(offer.prefix) && out.old_blocks == expected.old, out.old_blocks, " old");
    for (size_t lane = 0; lane <= model_.num_lanes; ++lane) {
      PC_CHECK(out.taken[lane] == expected.taken[lane], "lane ", lane, " takes ", shown(out.taken[lane]));
      PC_CHECK(out.duplicates[lane] == expected.duplicates[lane], "lane ", lane, " had ", shown(out.duplicates[lane]));
    }
  }

  void same_evicted(const std::vector<Ids>& out, const Lanes& gone) {
    for (size_t lane = 0; lane < gone.size(); ++lane)
      PC_CHECK(out[lane] == gone[lane], "lane ", lane, " gives up ", shown(out[lane]), ", expected ",
               shown(gone[lane]));
    bury();
  }

  ModelTree model_;
  RadixTree tree_;
  std::map<int, Held> receipts_;  // by name in the model
  std::map<int32_t, radix::NamespaceId> spaces_;

 private:
  // Changes since the last call, applied to what was there before, give what the tree holds.
  void same_journal() {
    radix::Changes contents;
    tree_.list_contents(contents);
    std::multiset<std::pair<int32_t, radix::ContentHash>> held;
    apply(contents, held);
    tree_.take_changes(changes_);
    PC_CHECK(!changes_.has_overflowed || changes_.records.empty(), "a journal has changes and an overflow");
    if (changes_.has_overflowed) {
      journal_held_ = held;
    } else {
      apply(changes_, journal_held_);
    }
    PC_CHECK(journal_held_ == held, "the journal gives ", journal_held_.size(), " blocks, the tree has ", held.size());
  }
  static void apply(const radix::Changes& changes, std::multiset<std::pair<int32_t, radix::ContentHash>>& held) {
    size_t next = 0;
    for (const radix::ChangeRecord& record : changes.records) {
      for (int32_t i = 0; i < record.count; ++i, ++next) {
        const std::pair block(record.component, changes.hashes[next]);
        if (record.is_stored) {
          held.insert(block);
        } else {
          const auto there = held.find(block);
          PC_CHECK(there != held.end(), "a block is removed that was not stored");
          held.erase(there);
        }
      }
    }
    PC_CHECK(next == changes.hashes.size(), next, " of ", changes.hashes.size(), " hashes have a record");
  }

  radix::Changes changes_;
  std::multiset<std::pair<int32_t, radix::ContentHash>> journal_held_;
};

}  // namespace pagecore::test
