// Batches of insertions: all offers are accepted, or none.
#include <algorithm>
#include <unordered_map>

#include "pagecore/index/radix/tree.hpp"

namespace pagecore {

namespace {

using radix::Ids;
using radix::Inserted;
using radix::Offer;

int64_t common_prefix(const radix::Query& a, const radix::Query& b, int64_t block_size) {
  if (a.space != b.space) return 0;
  const auto tokens = static_cast<int64_t>(std::min(a.tokens.size(), b.tokens.size()));
  const int64_t equal = radix::common_tokens(a.tokens.data(), b.tokens.data(), tokens);
  return radix::common_marks(a.marks, 0, b.marks, 0, equal / block_size);
}

// Places at which the offers of a batch put each id. An id has one place: the index of its block, in prefixes that are
// equal up to the end of that block. Few ids are offered twice, so that a first pass over all ids finds these, and a
// second pass compares only their places.
class Places {
 public:
  Places(std::span<const Offer> offers, const radix::Components& components)
      : offers_(offers), block_size_(components.block_size), lanes_(static_cast<size_t>(components.num_lanes()) + 1) {}

  // First pass.
  void count(int32_t lane, int32_t id) {
    Lane& it = lanes_[static_cast<size_t>(lane)];
    if (!it.once.add(id) && it.twice.add(id)) has_any_ = true;
  }
  // True if any id was offered twice.
  [[nodiscard]] bool has_any() const { return has_any_; }

  // Second pass.
  void check(int32_t lane, int32_t id, size_t offer, int64_t block) {
    Lane& it = lanes_[static_cast<size_t>(lane)];
    if (!it.twice.holds(id)) return;
    const auto [found, is_new] = it.places.try_emplace(id, Place{offer, block});
    if (is_new) return;
    const Place& other = found->second;
    PC_EXPECTS(other.block == block && (other.offer == offer || block < common(offer, other.offer)), DoubleFree,
               lane + 1 == static_cast<int32_t>(lanes_.size()) ? "state " : "block ", id,
               " is offered for two prefixes at once; offer only ids that hold the prefix");
  }

 private:
  struct Place {
    size_t offer;
    int64_t block;
  };
  struct Lane {
    radix::HeldIds once;
    radix::HeldIds twice;
    std::unordered_map<int32_t, Place> places;
  };

  // Consecutive ids ask about the same pair of offers.
  [[nodiscard]] int64_t common(size_t offer, size_t other) {
    if (offer != last_ || other != last_other_) {
      last_common_ = common_prefix(offers_[offer].query, offers_[other].query, block_size_);
      last_ = offer;
      last_other_ = other;
    }
    return last_common_;
  }

  std::span<const Offer> offers_;
  int64_t block_size_;
  std::vector<Lane> lanes_;  // states last
  bool has_any_ = false;
  size_t last_ = 0;
  size_t last_other_ = 0;
  int64_t last_common_ = 0;
};

// Calls `see(lane, id, block)` for each id of an offer, except ids that the tree has at the same place.
template <typename See>
void for_each_id(const radix::NodeStore& nodes, const radix::Path& path, const Offer& offer, int64_t blocks,
                 See&& see) {
  const int32_t num_lanes = nodes.components().num_lanes();
  for (int32_t i = 0; i < num_lanes; ++i) {
    const int32_t* const offered = offer.lanes[static_cast<size_t>(i)];
    int64_t block = 0;
    for (const radix::PathStep& step : path.steps) {
      const int32_t* const held = nodes.lane(step.node, i);
      for (int32_t k = 0; k < step.matched; ++k, ++block) {
        if (offered[block] != held[k] && offered[block] != kNullBlock) see(i, offered[block], block);
      }
    }
    for (; block < blocks; ++block) {
      if (offered[block] != kNullBlock) see(i, offered[block], block);
    }
  }
  for (const radix::State& state : offer.states) {
    if (nodes.state_after(path, state.blocks) != state.id) see(num_lanes, state.id, state.blocks - 1);
  }
}

// Room for every id of the offer: offers before it in the batch may change which of them the tree takes.
void reserve_answer(const Offer& offer, Inserted& out) {
  for (std::vector<Ids>* lists : {&out.taken, &out.duplicates}) {
    for (Ids& ids : std::span(*lists).first(lists->size() - 1)) ids.reserve(static_cast<size_t>(out.blocks));
    lists->back().reserve(offer.states.size());
  }
}

}  // namespace

// Claiming and withdrawing ids allocates their pages for good. Offers earlier in the batch can only add to the path of
// an offer, except in a tree without full lanes, where a receipt that moves can also remove empty nodes from it.
void RadixTree::prepare_all(std::span<const Offer> offers, Batch& batch) {
  batch.answers.resize(offers.size());
  batch.storages.resize(offers.size());
  check_batch(offers, batch.answers);
  int64_t nodes = 0;
  for (const Offer& offer : offers) {
    nodes += 3 + static_cast<int64_t>(offer.states.size() + offer.ranges.size()) + components_.num_cuts();
  }
  reserve(nodes);
  nodes_.reserve(nodes, offers.size());
  int64_t longest = 0;
  for (size_t i = 0; i < offers.size(); ++i) {
    Inserted& out = batch.answers[i];
    reserve_answer(offers[i], out);
    const int64_t first = components_.full_lanes > 0 ? out.old_blocks : 0;
    if (first < out.blocks) batch.storages[i] = nodes_.make_storage(offers[i].query, first, out.blocks - first);
    longest = std::max(longest, out.blocks);
  }
  path_.steps.reserve(static_cast<size_t>(std::min(longest, num_nodes() + nodes)));
}

// Checks each offer against the tree, then the offers against each other.
void RadixTree::check_batch(std::span<const Offer> offers, std::span<Inserted> answers) {
  Places places(offers, components_);
  for (size_t i = 0; i < offers.size(); ++i) {
    survey(offers[i], radix::top_of(offers[i].query.space), answers[i]);
    claims_.withdraw(answers[i]);
    if (offers.size() == 1) return;
    for_each_id(nodes_, path_, offers[i], answers[i].blocks,
                [&](int32_t lane, int32_t id, int64_t) { places.count(lane, id); });
  }
  if (!places.has_any()) return;
  for (size_t i = 0; i < offers.size(); ++i) {
    const Offer& offer = offers[i];
    nodes_.walk(offer.query, radix::top_of(offer.query.space), answers[i].blocks, path_);
    for_each_id(nodes_, path_, offer, answers[i].blocks,
                [&](int32_t lane, int32_t id, int64_t block) { places.check(lane, id, i, block); });
  }
}

}  // namespace pagecore
