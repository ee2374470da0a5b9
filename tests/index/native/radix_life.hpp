// Random calls of a RadixTree and its model; observable state is compared after each call (radix_compared.hpp).
#pragma once

#include <algorithm>
#include <memory>

#include "tests/index/native/radix_compared.hpp"
#include "tests/index/native/radix_memory.hpp"
#include "tests/index/native/radix_offers.hpp"

namespace pagecore::test {

class TreeLife : public ComparedTree {
 public:
  TreeLife(Random& random, const RadixTree::Options& options, bool is_memory_short)
      : ComparedTree(options), random_(random), offers_(random, model_), is_memory_short_(is_memory_short) {
    if (random_.one_in(2)) tree_.start_journal(size_t{1} << (random_.one_in(2) ? 10 : 20), {0});
  }

  void step() {
    switch (random_.below(20)) {
      case 0:
      case 1: look_up(); break;
      case 2:
      case 3:
      case 4: lock(); break;
      case 5: fork(); break;
      case 6:
      case 7:
      case 8: unlock(); break;
      case 9: insert_batch(); break;
      case 10:
      case 11: evict(); break;
      case 12:
      case 13: extend(); break;
      case 14: evict_path(); break;
      case 15:
        if (random_.one_in(4)) evict_namespace();
        break;
      case 16: lock_all(); break;
      default: insert(); break;
    }
    same();
  }

  // Releases and evicts everything: nothing is left.
  void end() {
    while (!receipts_.empty()) unlock();
    for (size_t c = model_.num_components; c-- > 0;) {
      evict_of(c, random_.one_in(2) ? random_.between(0, 5) : INT64_MAX);
      same();
    }
    evict_of(0, INT64_MAX);
    same();
    PC_CHECK(tree_.num_nodes() == 0 && spaces_.empty(), tree_.num_nodes(), " nodes are left");
  }

 private:
  // Runs `real`, sometimes first with memory that runs out: nothing may change then.
  template <typename Real>
  void with_little_memory(Real&& real) {
    if (is_memory_short_ && random_.one_in(2)) {
      try {
        const ShortMemory memory(random_.below(12));
        real();
        return;
      } catch (const std::bad_alloc&) {
      }
      bury();
      same();
    }
    real();
  }
  // Runs a call that must not allocate.
  template <typename Real>
  static void without_memory(Real&& real) {
    const ShortMemory memory(0);
    real();
    PC_CHECK(!ShortMemory::has_failed(), "memory was asked for");
  }

  // Steps.

  RadixTree::Match find(const Key& key, ModelMatch& expected) {
    const Prefix prefix = offers_.prefix_of(key);
    const int64_t limit = random_.one_in(3) ? random_.between(0, std::ssize(prefix)) : std::ssize(prefix);
    expected = model_.match(key.name, prefix, limit);
    RadixTree::Match match;
    const radix::NamespaceId space = space_of(key.name);
    if (space >= 0) without_memory([&] { match = tree_.match(key.query(space), limit); });
    PC_CHECK(match.blocks == expected.blocks, match.blocks, " blocks match, expected ", expected.blocks);
    PC_CHECK(match.full_blocks == std::ssize(expected.path), match.full_blocks, " full blocks");
    PC_CHECK(match.state == (model_.has_states ? expected.state : radix::kNoState), "state ", match.state);
    PC_CHECK(match.checkpoint == expected.checkpoint, "checkpoint ", match.checkpoint);
    same_ids(match, expected);
    return match;
  }
  void look_up() {
    ModelMatch expected;
    static_cast<void>(find(offers_.some_key(), expected));
  }

  void lock() {
    ModelMatch expected;
    const Key key = offers_.some_key();
    RadixTree::Match match = find(key, expected);
    RadixTree::Receipt receipt;
    with_little_memory([&] { receipt = tree_.lock(match, (1u << model_.num_components) - 1); });
    receipts_[model_.lock(expected)] = {receipt, key.name};
    same_ids(match, expected);
  }

  void lock_all() {
    const auto count = static_cast<size_t>(random_.below(4));
    std::vector<ModelMatch> expected(count);
    std::vector<RadixTree::Match> matches(count);
    std::vector<RadixTree::Receipt> receipts(count);
    std::vector<RadixTree::Receipt*> pointers(count);
    std::vector<Key> keys;  // fewer than matches, which often end in the same node
    std::vector<size_t> key_of(count);
    for (size_t i = 0; i < count; ++i) {
      if (i == 0 || random_.one_in(2)) keys.push_back(offers_.some_key());
      key_of[i] = keys.size() - 1;
      matches[i] = find(keys.back(), expected[i]);
      pointers[i] = &receipts[i];
    }
    with_little_memory([&] { tree_.lock_all(matches, (1u << model_.num_components) - 1, pointers); });
    const std::vector<int> names = model_.lock_all(expected);
    for (size_t i = 0; i < count; ++i) receipts_[names[i]] = {receipts[i], keys[key_of[i]].name};
  }

  void fork() {
    if (receipts_.empty()) return;
    const auto& [name, held] = random_.pick(receipts_);
    Held other = held;
    without_memory([&] { other.receipt = tree_.lock_again(held.receipt); });
    receipts_[model_.fork(name)] = other;
  }

  void unlock() {
    if (receipts_.empty()) return;
    auto& [name, held] = random_.pick(receipts_);
    RadixTree::Receipt& receipt = held.receipt;
    const uint32_t every = (1u << model_.num_components) - 1;
    const uint32_t some = random_.one_in(3) ? 1u << random_.below(static_cast<int64_t>(model_.num_components)) : every;
    radix::RetentionHint hint;
    if (random_.one_in(3)) hint.rank = static_cast<double>(random_.between(-2, 2));
    if (model_.full > 0) {
      without_memory([&] { tree_.unlock(receipt, some & every, hint); });
    } else {  // a leaf may be removed, and its storage compacted, or not
      tree_.unlock(receipt, some & every, hint);
    }
    const int gone = name;
    const bool is_over = receipt.components == 0;
    model_.unlock(gone, some & every, hint);
    PC_CHECK(is_over != model_.receipts.contains(gone), "receipt ", gone, " is over: ", is_over);
    if (is_over) receipts_.erase(gone);
    bury();
  }

  // Key of a receipt in the map, or -1.
  int some_receipt() { return receipts_.empty() || random_.one_in(2) ? -1 : random_.pick(receipts_).first; }

  void insert_into(const Offered& made, int receipt, RadixTree::Inserted& out) {
    const int32_t name = made.key.name;
    const bool is_new = space_of(name) < 0;
    if (is_new) add_space(name);
    try {
      tree_.insert(made.offer(space_of(name)), receipt < 0 ? nullptr : &receipts_.at(receipt).receipt, out);
    } catch (...) {
      if (is_new) tree_.drop_namespace_if_empty(space_of(name));
      throw;
    }
    if (is_new) tree_.drop_namespace_if_empty(space_of(name));
  }
  void insert() {
    const Offered made = offers_.some_offer(false);
    const int receipt = some_receipt();
    ModelTree::Inserted expected;
    RadixTree::Inserted out;
    if (agree(
            model_, "insert", [&](ModelTree& model) { expected = model.insert(made.model, receipt); },
            [&] { with_little_memory([&] { insert_into(made, receipt, out); }); })) {
      same_inserted(made.model, out, expected);
      if (receipt >= 0 && out.blocks > 0) receipts_.at(receipt).name = made.key.name;
    }
    bury();
  }
  // Extends a sequence past its receipt; ids offered for earlier blocks are ignored.
  void extend() {
    if (receipts_.empty()) return;
    auto& [name, held] = random_.pick(receipts_);
    const size_t old = model_.path(model_.receipts.at(name).end).size();
    const Offered made = offers_.some_extension(old, held.name);
    ModelTree::Inserted expected;
    RadixTree::Inserted out;
    if (agree(
            model_, "extend", [&, which = name](ModelTree& model) { expected = model.extend(made.model, which); },
            [&] { with_little_memory([&] { extend_into(made, held, out); }); })) {
      same_inserted(made.model, out, expected);
    }
    bury();
  }
  void extend_into(const Offered& made, Held& held, RadixTree::Inserted& out) {
    const bool is_new = held.receipt.node == radix::kNoNode && space_of(held.name) < 0;
    if (is_new) add_space(held.name);
    const radix::NamespaceId space = held.receipt.node == radix::kNoNode ? space_of(held.name) : 0;
    try {
      tree_.extend(made.offer(space), held.receipt, out);
    } catch (...) {
      if (is_new) tree_.drop_namespace_if_empty(space);
      throw;
    }
    if (is_new) tree_.drop_namespace_if_empty(space);
  }

  // Inserts a batch: a prepared batch allocates nothing, and an invalid batch is refused as a whole.
  void insert_batch() {
    std::vector<Offered> made;
    std::vector<int> receipts;
    const bool is_honest = random_.one_in(2);
    for (int64_t left = random_.between(1, 4); left > 0; --left) {
      made.push_back(offers_.some_offer(is_honest));
      receipts.push_back(some_receipt());
      if (!is_honest && made.size() > 1 && random_.one_in(3)) borrow(made.front(), made.back());
    }
    ModelTree next = model_;
    std::vector<ModelTree::Inserted> expected;
    bool is_possible = true;
    try {
      for (size_t i = 0; i < made.size(); ++i) expected.push_back(next.insert(made[i].model, receipts[i]));
    } catch (const Error&) {
      is_possible = false;
    }
    std::vector<RadixTree::Inserted> out;
    if (!insert_all(made, receipts, out)) {
      PC_CHECK(!is_possible || !is_honest, "a valid batch was refused");
      return;
    }
    PC_CHECK(is_possible, "an invalid batch was accepted");
    model_ = next;
    for (size_t i = 0; i < made.size(); ++i) {
      same_inserted(made[i].model, out[i], expected[i]);
      if (receipts[i] >= 0 && out[i].blocks > 0) receipts_.at(receipts[i]).name = made[i].key.name;
    }
    bury();
  }
  // Copies ids of an earlier offer to a later one.
  void borrow(const Offered& from, Offered& to) {
    if (to.lanes.empty()) return;
    const auto lane = static_cast<size_t>(random_.below(std::ssize(to.lanes)));
    Ids& ids = to.model.lanes[lane];
    const Ids& theirs = from.model.lanes[lane];
    for (size_t i = 0; i < std::min(ids.size(), theirs.size()); ++i) {
      if (ids[i] != kNullBlock && theirs[i] != kNullBlock) ids[i] = theirs[i];
    }
    to.lanes[lane].~Exact();
    new (&to.lanes[lane]) Exact<int32_t>(ids);
  }
  bool insert_all(const std::vector<Offered>& made, const std::vector<int>& receipts,
                  std::vector<RadixTree::Inserted>& out) {
    std::vector<RadixTree::Prepared> batch;
    std::vector<RadixTree::Offer> offers;
    bool is_fine = true;
    const auto drop_spaces = [&] {
      for (const Offered& each : made) {
        if (space_of(each.key.name) > 0) tree_.drop_namespace_if_empty(space_of(each.key.name));
      }
    };
    with_little_memory([&] {
      try {
        batch.clear();
        offers.clear();
        for (const Offered& each : made) {
          if (space_of(each.key.name) < 0) add_space(each.key.name);
          offers.push_back(each.offer(space_of(each.key.name)));
        }
        tree_.prepare_all(offers, batch);
      } catch (const Error&) {
        is_fine = false;
      } catch (const std::bad_alloc&) {
        drop_spaces();
        throw;
      }
    });
    if (is_fine) {
      const ShortMemory memory(random_.one_in(2) ? 0 : INT64_MAX);
      for (size_t i = 0; i < made.size(); ++i) {
        RadixTree::Receipt* const receipt = receipts[i] < 0 ? nullptr : &receipts_.at(receipts[i]).receipt;
        tree_.insert_prepared(offers[i], receipt, batch[i]);
      }
    }
    drop_spaces();
    bury();
    for (RadixTree::Prepared& each : batch) out.push_back(std::move(each.answer));
    return is_fine;
  }

  void evict() {
    evict_of(static_cast<size_t>(random_.below(static_cast<int64_t>(model_.num_components))),
             random_.one_in(6) ? INT64_MAX : random_.between(0, 8));
  }
  void evict_of(size_t c, int64_t amount) {
    if (random_.one_in(3)) {
      model_.advance(offers_.later());
      tree_.advance(offers_.time());
    }
    int64_t evicted = 0;
    std::vector<Ids> out;
    with_little_memory([&] { evicted = tree_.evict(static_cast<int32_t>(c), amount, out); });
    const int64_t before = model_.held(c), can_go = model_.evictable(c);
    const Lanes gone = model_.evict(c, amount);
    PC_CHECK(evicted == before - model_.held(c), "of component ", c, " went ", evicted);
    PC_CHECK(model_.full == 0 || evicted == std::min(amount, can_go), "of component ", c, " went ", evicted);
    same_evicted(out, gone);
  }
  void evict_path() {
    const Key key = offers_.some_key();
    const Prefix prefix = offers_.prefix_of(key);
    const int64_t keep = random_.between(0, std::ssize(prefix));
    const radix::NamespaceId space = space_of(key.name);
    if (space < 0) return;
    int64_t evicted = 0, expected = 0;
    std::vector<Ids> out;
    with_little_memory([&] { evicted = tree_.evict_path(key.query(space), std::ssize(prefix), keep, out); });
    const Lanes gone = model_.evict_path(key.name, prefix, keep, expected);
    PC_CHECK(evicted == expected, evicted, " blocks of a path went, expected ", expected);
    same_evicted(out, gone);
  }
  void evict_namespace() {
    const Key key = offers_.some_key();
    const radix::NamespaceId space = space_of(key.name);
    if (space < 0) return;
    int64_t evicted = 0, expected = 0;
    std::vector<Ids> out;
    with_little_memory([&] { evicted = tree_.evict_namespace(space, out); });
    Lanes gone = model_.evict_namespace(key.name, expected);
    PC_CHECK(evicted == expected, evicted, " blocks of a namespace went, expected ", expected);
    for (Ids& ids : out) std::sort(ids.begin(), ids.end());
    for (auto& ids : gone) std::sort(ids.begin(), ids.end());
    same_evicted(out, gone);
  }
  Random& random_;
  Offers offers_;
  bool is_memory_short_;
};

}  // namespace pagecore::test
