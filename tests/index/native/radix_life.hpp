// A random life of a RadixTree, step by step beside its model; all that both can tell is compared after each step.
#pragma once

#include <memory>

#include "tests/index/native/model_pool.hpp"
#include "tests/index/native/radix_memory.hpp"
#include "tests/index/native/radix_model.hpp"

namespace pagecore::test {

// A prefix as a caller has it: the memory is as long as it must be and no longer.
struct Key {
  int32_t name = 0;  // of the namespace
  Exact<int32_t> tokens;
  std::vector<std::array<int64_t, 3>> spans;  // start, end, digest; disjoint, in order
  std::vector<radix::Mark> marks;

  [[nodiscard]] radix::Query query(radix::NamespaceId space) const { return {tokens.span(), marks, space}; }
};

inline RadixTree::Options some_options(Random& random) {
  RadixTree::Options options;
  options.block_size = random.pick({1, 1, 2, 3, 4, 16, 70});
  options.full_lanes = random.pick({1, 1, 1, 2, 3});
  for (int64_t left = random.pick({0, 0, 1, 1, 2, 3}); left > 0; --left)
    options.windows.push_back(random.between(1, 5 * options.block_size));
  options.has_states = random.one_in(3);
  options.state_interval = options.has_states ? options.block_size * random.between(1, 3) : 0;
  options.policy = static_cast<radix::Policy>(random.below(8));
  return options;
}

class TreeLife {
 public:
  TreeLife(Random& random, const RadixTree::Options& options, bool is_memory_short)
      : random_(random), model_(options), tree_(options), is_memory_short_(is_memory_short) {
    next_id_.assign(model_.num_lanes + 1, random.pick({0, 32700, 65500}));
    const int64_t length = 12 * options.block_size;
    for (int64_t i = 0; i < length; ++i) base_.push_back(static_cast<int32_t>(random.below(2)));
  }

  void step() {
    switch (random_.below(18)) {
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
      default: insert(); break;
    }
    same();
  }

  void same() {
    tree_.check_invariants();
    PC_CHECK(tree_.num_nodes() == model_.num_nodes(), tree_.num_nodes(), " nodes, expected ", model_.num_nodes());
    PC_CHECK(tree_.num_receipts() == std::ssize(model_.receipts), tree_.num_receipts(), " receipts");
    for (size_t c = 0; c < model_.num_components; ++c) {
      const auto component = static_cast<int32_t>(c);
      PC_CHECK(tree_.held(component) == model_.held(c), "component ", c, " holds ", tree_.held(component));
      PC_CHECK(tree_.evictable(component) == model_.evictable(c), tree_.evictable(component), " of component ", c,
               " can go, expected ", model_.evictable(c));
    }
    for (const auto& [name, held] : receipts_) {
      const RadixTree::Receipt& receipt = held.receipt;
      const ModelReceipt& known = model_.receipts.at(name);
      PC_CHECK(tree_.depth(receipt.node) == std::ssize(model_.path(known.end)), "receipt ", name, " ends elsewhere");
      PC_CHECK(receipt.components == known.components, "receipt ", name, " holds ", receipt.components);
    }
    std::set<int32_t> used;
    for (const auto& [name, root] : model_.roots) used.insert(name);
    for (const auto& [name, space] : spaces_) PC_CHECK(used.contains(name), "namespace ", name, " is dead");
    PC_CHECK(std::ssize(used) - used.contains(0) == std::ssize(spaces_), spaces_.size(), " namespaces");
  }

  // All is given back and evicted: nothing is left, and what a tree costs is small again.
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
  // Runs `real`, perhaps first with memory that runs out: nothing may have changed when it does.
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
  // What never needs memory.
  template <typename Real>
  static void without_memory(Real&& real) {
    const ShortMemory memory(0);
    real();
    PC_CHECK(!ShortMemory::has_failed(), "memory was asked for");
  }

  struct Held {
    RadixTree::Receipt receipt;
    int32_t name = 0;  // of its namespace
  };

  // Keys.

  Key some_key() {
    Tokens tokens(base_.begin(), base_.begin() + random_.between(0, std::ssize(base_)));
    for (int64_t left = random_.below(3); left > 0 && !tokens.empty(); --left)
      random_.pick(tokens) = random_.pick({0, 1, 2, INT32_MAX, INT32_MIN});
    Key key{static_cast<int32_t>(random_.one_in(4) ? random_.below(4) : 0), Exact<int32_t>(tokens), {}, {}};
    int64_t from = 0;
    for (int64_t left = random_.one_in(5) ? random_.between(1, 2) : 0; left > 0; --left) {
      const int64_t start = from + random_.below(3 * model_.block_size);
      from = start + random_.between(1, 3 * model_.block_size);
      add_span(key, start, from, random_.pick({1, 2, -1}));
    }
    return key;
  }
  void add_span(Key& key, int64_t start, int64_t end, int64_t digest) {
    const int64_t size = model_.block_size, blocks = std::ssize(key.tokens.span()) / size;
    key.spans.push_back({start, end, digest});
    radix::Digest content;
    content.kind = digest < 0 ? 1 : -1;
    content.bytes[0] = static_cast<uint8_t>(std::abs(digest));
    for (int64_t b = start / size; b < std::min(blocks, (end - 1) / size + 1); ++b)
      key.marks.push_back({static_cast<int32_t>(b), start - b * size, end - b * size, content});
  }
  [[nodiscard]] Prefix prefix_of(const Key& key) const {
    const int64_t size = model_.block_size;
    Prefix prefix;
    for (int64_t first = 0; first + size <= std::ssize(key.tokens.span()); first += size) {
      const int32_t* const begin = key.tokens.data() + first;
      prefix.push_back({Tokens(begin, begin + size), {}});
      for (const auto& [start, end, digest] : key.spans) {
        if (start < first + size && end > first) prefix.back().second.push_back({start - first, end - first, digest});
      }
    }
    return prefix;
  }

  // Namespaces, as the binding keeps them.

  [[nodiscard]] radix::NamespaceId space_of(int32_t name) const {
    if (name == 0) return 0;
    return spaces_.contains(name) ? spaces_.at(name) : -1;
  }
  void bury() {
    if (!tree_.has_dead_namespaces()) return;
    for (const radix::NamespaceId gone : tree_.take_dead_namespaces()) {
      const size_t before = spaces_.size();
      std::erase_if(spaces_, [&](const auto& each) { return each.second == gone; });
      PC_CHECK(spaces_.size() == before - 1, "namespace ", gone, " was not in use");
    }
  }

  // Steps.

  RadixTree::Match find(const Key& key, ModelMatch& expected) {
    const Prefix prefix = prefix_of(key);
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
  void same_ids(const RadixTree::Match& match, const ModelMatch& expected) {
    for (size_t lane = 0; lane < model_.num_lanes && match.blocks > 0; ++lane) {
      Exact<int32_t> ids(static_cast<size_t>(match.blocks));
      ids.fill(-7);
      tree_.copy_blocks(match.node, match.offset, static_cast<int32_t>(lane), ids.span());
      PC_CHECK(ids.copy() == expected.ids[lane], "lane ", lane, ": ", shown(ids.copy()), ", expected ",
               shown(expected.ids[lane]));
    }
  }

  void look_up() {
    ModelMatch expected;
    static_cast<void>(find(some_key(), expected));
  }

  void lock() {
    ModelMatch expected;
    const Key key = some_key();
    RadixTree::Match match = find(key, expected);
    RadixTree::Receipt receipt;
    with_little_memory([&] { receipt = tree_.lock(match, (1u << model_.num_components) - 1); });
    receipts_[model_.lock(expected)] = {receipt, key.name};
    same_ids(match, expected);
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
    radix::Wish wish;
    if (random_.one_in(3)) wish.rank = static_cast<double>(random_.between(-2, 2));
    without_memory([&] { tree_.unlock(receipt, some & every, wish); });
    const int gone = name;
    const bool is_over = receipt.components == 0;
    model_.unlock(gone, some & every, wish);
    PC_CHECK(is_over != model_.receipts.contains(gone), "receipt ", gone, " is over: ", is_over);
    if (is_over) receipts_.erase(gone);
  }

  // What a caller might offer for the key: the tree's own ids, others for the same blocks, holes; now and then wrong.
  struct Offered {
    Key key;
    ModelOffer model;
    std::vector<Exact<int32_t>> lanes;
    std::vector<RadixTree::State> states;

    RadixTree::Offer offer(radix::NamespaceId space) const {
      RadixTree::Offer offer{key.query(space), {}, states, model.wish, model.time};
      for (const Exact<int32_t>& lane : lanes) offer.lanes.push_back(lane.data());
      return offer;
    }
  };
  Offered some_offer(bool is_honest) {
    Offered made{some_key(), {}, {}, {}};
    ModelOffer& model = made.model;
    model.space = made.key.name;
    model.prefix = prefix_of(made.key);
    const std::vector<int> known = model_.find(model.space, model.prefix);
    const bool is_same = random_.one_in(2);
    for (size_t lane = 0; lane < model_.num_lanes; ++lane) {
      Ids ids;
      const int64_t holes = lane < model_.full || random_.one_in(2) ? 0 : random_.between(0, std::ssize(model.prefix));
      for (size_t i = 0; i < model.prefix.size(); ++i) {
        const bool is_hole = lane >= model_.full && (std::cmp_less(i, holes) || random_.one_in(8));
        const int32_t old = is_same && i < known.size() ? model_.id_at(known[i], lane) : kNullBlock;
        ids.push_back(is_hole ? kNullBlock : old != kNullBlock ? old : fresh_id(lane));
      }
      if (!is_honest && !ids.empty() && random_.one_in(12)) spoil(ids, lane);
      model.lanes.push_back(ids);
      made.lanes.emplace_back(ids);
    }
    if (model_.has_states || random_.one_in(40)) add_states(made, is_honest);
    model.wish = some_wish();
    if (random_.one_in(2)) model.time = time_;
    return made;
  }
  void spoil(Ids& ids, size_t lane) {
    const std::set<int32_t> held = model_.held_ids(lane);
    const int32_t foreign = held.empty() ? -1 : random_.pick(held);
    random_.pick(ids) = random_.pick({foreign, foreign, 0, -1, INT32_MIN, ids.front(), ids.back()});
  }
  void add_states(Offered& made, bool is_honest) {
    const int64_t blocks = std::ssize(made.model.prefix);
    std::set<int64_t> ends;
    for (int64_t left = random_.below(4); left > 0 && blocks > 0; --left) ends.insert(random_.between(1, blocks));
    if (!is_honest && random_.one_in(15)) ends.insert(random_.pick({int64_t{0}, int64_t{-1}, blocks + 1}));
    const std::set<int32_t> held = model_.held_ids(model_.num_lanes);
    for (const int64_t end : ends) {
      int32_t id = fresh_id(model_.num_lanes);
      if (!is_honest && random_.one_in(12)) id = held.empty() ? -1 : random_.pick(held);
      made.model.states.emplace_back(end, id);
      made.states.push_back({end, id});
    }
  }
  radix::Wish some_wish() {
    radix::Wish wish;
    time_ += static_cast<double>(random_.below(2));
    if (model_.policy == radix::Policy::Rank && random_.one_in(2))
      wish.rank = static_cast<double>(random_.between(-2, 2));
    if (model_.policy == radix::Policy::Priority && random_.one_in(2)) {
      wish.priority = random_.pick({0.0, 20.0, 35.0, 80.0, 100.0});
      if (random_.one_in(2)) wish.expiry = time_ + static_cast<double>(random_.below(4));
    }
    return wish;
  }
  // One that the tree does not hold.
  int32_t fresh_id(size_t lane) {
    const std::set<int32_t> held = model_.held_ids(lane);
    do {
      next_id_[lane] = next_id_[lane] % 66000 + 1;
    } while (held.contains(next_id_[lane]));
    return next_id_[lane];
  }

  // The receipt's place in the map, or none.
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
  void add_space(int32_t name) {
    spaces_[name] = -1;
    try {
      spaces_[name] = tree_.add_namespace();
    } catch (...) {
      spaces_.erase(name);
      throw;
    }
  }

  void insert() {
    const Offered made = some_offer(false);
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
  void same_inserted(const ModelOffer& offer, const RadixTree::Inserted& out, const ModelTree::Inserted& expected) {
    PC_CHECK(out.blocks == std::ssize(offer.prefix) && out.old_blocks == expected.old, out.old_blocks, " old");
    for (size_t lane = 0; lane <= model_.num_lanes; ++lane) {
      PC_CHECK(out.taken[lane] == expected.taken[lane], "lane ", lane, " takes ", shown(out.taken[lane]));
      PC_CHECK(out.duplicates[lane] == expected.duplicates[lane], "lane ", lane, " had ", shown(out.duplicates[lane]));
    }
  }

  // A sequence runs on from where its receipt ends; what it offers of the blocks before is nobody's business.
  void extend() {
    if (receipts_.empty()) return;
    auto& [name, held] = random_.pick(receipts_);
    const size_t old = model_.path(model_.receipts.at(name).end).size();
    const Offered made = some_extension(old, held.name);
    ModelTree::Inserted expected;
    RadixTree::Inserted out;
    if (agree(
            model_, "extend", [&, which = name](ModelTree& model) { expected = model.extend(made.model, which); },
            [&] { with_little_memory([&] { extend_into(made, held, out); }); })) {
      same_inserted(made.model, out, expected);
    }
    bury();
  }
  Offered some_extension(size_t old, int32_t name) {
    const auto size = static_cast<size_t>(model_.block_size);
    size_t length = old * size + static_cast<size_t>(random_.below(random_.pick({1, 2, 5}) * model_.block_size + 1));
    if (random_.one_in(20)) length = static_cast<size_t>(random_.below(static_cast<int64_t>(length) + 1));
    Tokens tokens(length, -5);
    for (size_t i = old * size; i < length; ++i)
      tokens[i] = i < base_.size() && !random_.one_in(12) ? base_[i] : static_cast<int32_t>(random_.below(2));
    Offered made{Key{name, Exact<int32_t>(tokens), {}, {}}, {}, {}, {}};
    made.model.space = name;
    made.model.prefix = prefix_of(made.key);
    for (size_t lane = 0; lane < model_.num_lanes; ++lane) {
      Ids ids;
      const bool has_holes = lane >= model_.full && random_.one_in(3);
      for (size_t i = 0; i < made.model.prefix.size(); ++i)
        ids.push_back(i < old ? -9 : has_holes && random_.one_in(3) ? kNullBlock : fresh_id(lane));
      if (ids.size() > old && random_.one_in(15)) {
        Ids fresh(ids.begin() + static_cast<int64_t>(old), ids.end());
        spoil(fresh, lane);
        std::copy(fresh.begin(), fresh.end(), ids.begin() + static_cast<int64_t>(old));
      }
      made.model.lanes.push_back(ids);
      made.lanes.emplace_back(ids);
    }
    if (random_.one_in(2)) made.model.time = time_;
    return made;
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

  // Several at once: what check_all lets through can be inserted; what nobody could refuse singly it lets through.
  void insert_batch() {
    std::vector<Offered> made;
    const bool is_honest = random_.one_in(2);
    for (int64_t left = random_.between(1, 4); left > 0; --left) {
      made.push_back(some_offer(is_honest));
      if (!is_honest && made.size() > 1 && random_.one_in(3)) borrow(made.front(), made.back());
    }
    ModelTree next = model_;
    bool is_possible = true;
    try {
      for (const Offered& each : made) static_cast<void>(next.insert(each.model, -1));
    } catch (const Error&) {
      is_possible = false;
    }
    if (!check_batch(made)) {
      PC_CHECK(!is_possible || !is_honest, "a batch was refused that could be inserted");
      return;
    }
    PC_CHECK(is_possible, "a batch was let through that cannot be inserted");
    RadixTree::Inserted out;
    for (const Offered& each : made) {
      with_little_memory([&] { insert_into(each, -1, out); });
      static_cast<void>(model_.insert(each.model, -1));
      bury();
    }
  }
  // The later one offers what the earlier one does.
  void borrow(const Offered& from, Offered& to) {
    const auto lane = static_cast<size_t>(random_.below(std::ssize(to.lanes)));
    Ids& ids = to.model.lanes[lane];
    const Ids& theirs = from.model.lanes[lane];
    for (size_t i = 0; i < std::min(ids.size(), theirs.size()); ++i) {
      if (ids[i] != kNullBlock && theirs[i] != kNullBlock) ids[i] = theirs[i];
    }
    to.lanes[lane].~Exact();
    new (&to.lanes[lane]) Exact<int32_t>(ids);
  }
  bool check_batch(const std::vector<Offered>& made) {
    std::vector<RadixTree::Offer> offers;
    for (const Offered& each : made) {
      const radix::NamespaceId space = space_of(each.key.name);
      offers.push_back(each.offer(space < 0 ? INT32_MAX - each.key.name : space));
    }
    RadixTree::Inserted out;
    bool is_fine = true;
    with_little_memory([&] {
      try {
        tree_.check_all(offers, out);
      } catch (const Error&) {
        is_fine = false;
      }
    });
    return is_fine;
  }

  void evict() {
    evict_of(static_cast<size_t>(random_.below(static_cast<int64_t>(model_.num_components))),
             random_.one_in(6) ? INT64_MAX : random_.between(0, 8));
  }
  void evict_of(size_t c, int64_t amount) {
    if (random_.one_in(3)) {
      time_ += 1;
      model_.advance(time_);
      tree_.advance(time_);
    }
    const int64_t expected = std::min(amount, model_.evictable(c));
    std::vector<Ids> out;
    with_little_memory([&] {
      PC_CHECK(tree_.evict(static_cast<int32_t>(c), amount, out) == expected, "of component ", c, " went ",
               shown(out.front()));
    });
    const Lanes gone = model_.evict(c, amount);
    for (size_t lane = 0; lane < gone.size(); ++lane)
      PC_CHECK(out[lane] == gone[lane], "lane ", lane, " gives up ", shown(out[lane]), ", expected ",
               shown(gone[lane]));
    bury();
  }

  Random& random_;
  ModelTree model_;
  RadixTree tree_;
  bool is_memory_short_;
  Tokens base_;
  Ids next_id_;
  std::map<int, Held> receipts_;  // by the model's name
  std::map<int32_t, radix::NamespaceId> spaces_;
  double time_ = 0;
};

}  // namespace pagecore::test
