// Random arguments for a radix tree, sometimes invalid: prefixes, blocks, states, retention hints.
#pragma once

#include <utility>

#include "tests/index/native/radix_model.hpp"

namespace pagecore::test {

// A prefix in memory of exact size.
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
  options.min_kept = random.pick({0, 0, 2, 4});
  if ((options.has_states || !options.windows.empty()) && random.one_in(4)) options.full_lanes = 0;
  options.policy = static_cast<radix::Policy>(random.below(8));
  options.protected_share = static_cast<double>(random.below(5)) / 4;
  return options;
}

// Blocks and states for a prefix, for the tree and for its model.
struct Offered {
  Key key;
  ModelOffer model;
  std::vector<Exact<int32_t>> lanes;
  std::vector<RadixTree::State> states;

  RadixTree::Offer offer(radix::NamespaceId space) const {
    RadixTree::Offer offer{key.query(space), {}, states, model.hint, model.time, model.ranges};
    for (const Exact<int32_t>& lane : lanes) offer.lanes.push_back(lane.data());
    return offer;
  }
};
class Offers {
 public:
  Offers(Random& random, const ModelTree& model) : random_(random), model_(model) {
    next_id_.assign(model_.num_lanes + 1, random.pick({0, 32700, 65500}));
    const int64_t length = 12 * model.block_size;
    for (int64_t i = 0; i < length; ++i) base_.push_back(static_cast<int32_t>(random.below(2)));
  }

  [[nodiscard]] double time() const { return time_; }
  double later() { return time_ += 1; }

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

  // Ids of the tree, other ids for the same blocks, holes; sometimes invalid ids.
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
    model.hint = some_hint();
    if (random_.one_in(2)) model.time = time_;
    if (model_.policy == radix::Policy::Priority && random_.one_in(2)) add_ranges(model);
    return made;
  }

  // Extension of a sequence whose receipt holds `old` blocks; ids offered for these are ignored.
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

 private:
  void add_span(Key& key, int64_t start, int64_t end, int64_t digest) {
    const int64_t size = model_.block_size, blocks = std::ssize(key.tokens.span()) / size;
    key.spans.push_back({start, end, digest});
    radix::Digest content;
    content.kind = digest < 0 ? 1 : -1;
    content.bytes[0] = static_cast<uint8_t>(std::abs(digest));
    for (int64_t b = start / size; b < std::min(blocks, (end - 1) / size + 1); ++b)
      key.marks.push_back({static_cast<int32_t>(b), start - b * size, end - b * size, content});
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
  void add_ranges(ModelOffer& offer) {
    offer.hint = {};
    for (int64_t end = 0; end < std::ssize(offer.prefix);) {
      end += random_.between(0, 4);
      offer.ranges.push_back({random_.one_in(5) ? end + std::ssize(offer.prefix) : end, some_hint()});
      end = offer.ranges.back().end;
    }
  }
  radix::RetentionHint some_hint() {
    radix::RetentionHint hint;
    time_ += static_cast<double>(random_.below(2));
    if (model_.policy == radix::Policy::Rank && random_.one_in(2))
      hint.rank = static_cast<double>(random_.between(-2, 2));
    if (model_.policy == radix::Policy::Priority && random_.one_in(2)) {
      hint.priority = random_.pick({0.0, 20.0, 35.0, 80.0, 100.0});
      if (random_.one_in(2)) hint.expiry = time_ + static_cast<double>(random_.below(4));
    }
    return hint;
  }
  // Returns an id that the tree does not hold.
  int32_t fresh_id(size_t lane) {
    const std::set<int32_t> held = model_.held_ids(lane);
    do {
      next_id_[lane] = next_id_[lane] % 66000 + 1;
    } while (held.contains(next_id_[lane]));
    return next_id_[lane];
  }

  Random& random_;
  const ModelTree& model_;
  Tokens base_;
  Ids next_id_;
  double time_ = 0;
};

}  // namespace pagecore::test
