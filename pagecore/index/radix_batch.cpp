// What is offered together is refused together: each offer against the tree, then the offers against each other.
#include <algorithm>
#include <unordered_map>

#include "pagecore/index/radix_tree.hpp"

namespace pagecore {

namespace {

// Leading blocks that two queries have in common.
int64_t common_prefix(const radix::Query& a, const radix::Query& b, int64_t block_size) {
  if (a.space != b.space) return 0;
  const auto tokens = static_cast<int64_t>(std::min(a.tokens.size(), b.tokens.size()));
  const int64_t equal = radix::common_tokens(a.tokens.data(), b.tokens.data(), tokens);
  return radix::common_marks(a.marks, 0, b.marks, 0, equal / block_size);
}

}  // namespace

// Where the offers of a batch want each id to stand. An id has one place: a block, counted from the start, of the
// prefixes that are equal up to its end. Few ids are offered twice: one look at all finds those, another their places.
class RadixTree::Places {
 public:
  Places(std::span<const Offer> offers, int64_t block_size, int32_t num_lanes)
      : offers_(offers), block_size_(block_size), lanes_(static_cast<size_t>(num_lanes) + 1) {}

  void note(int32_t lane, int32_t id) {
    Lane& it = lanes_[static_cast<size_t>(lane)];
    if (!it.seen.add(id) && it.again.add(id)) has_any_ = true;
  }
  // Whether any id was noted twice.
  [[nodiscard]] bool has_any() const { return has_any_; }

  void want(int32_t lane, int32_t id, size_t offer, int64_t block) {
    Lane& it = lanes_[static_cast<size_t>(lane)];
    if (!it.again.holds(id)) return;
    const auto [found, is_new] = it.wanted.try_emplace(id, Place{offer, block});
    if (is_new) return;
    const Place& other = found->second;
    PC_EXPECTS(other.block == block && (other.offer == offer || block < common(offer, other.offer)), DoubleFree,
               lane + 1 == static_cast<int32_t>(lanes_.size()) ? "state " : "block ", id,
               " is offered for two prefixes at once; offer only what its own prefix has computed");
  }

 private:
  struct Place {
    size_t offer;
    int64_t block;
  };
  struct Lane {
    radix::HeldIds seen;
    radix::HeldIds again;
    std::unordered_map<int32_t, Place> wanted;
  };

  // One id after the other asks about the same pair.
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
  std::vector<Lane> lanes_;  // the states come last
  bool has_any_ = false;
  size_t last_ = 0;
  size_t last_other_ = 0;
  int64_t last_common_ = 0;
};

void RadixTree::check_all(std::span<const Offer> offers, Inserted& out) {
  Places places(offers, block_size_, num_lanes());
  for (const Offer& offer : offers) {
    survey(offer, -1 - offer.query.space, out);
    give_up_claims(out);
    if (offers.size() == 1) return;
    see_places(offer, out.blocks, [&](int32_t lane, int32_t id, int64_t) { places.note(lane, id); });
  }
  if (!places.has_any()) return;
  for (size_t i = 0; i < offers.size(); ++i) {
    walk(offers[i], -1 - offers[i].query.space, static_cast<int64_t>(offers[i].query.tokens.size()) / block_size_, out);
    see_places(offers[i], out.blocks,
               [&](int32_t lane, int32_t id, int64_t block) { places.want(lane, id, i, block); });
  }
}

// Of the offer that was walked last: all but what the tree has at this very place, which it has nowhere else.
template <typename See>
void RadixTree::see_places(const Offer& offer, int64_t blocks, See&& see) const {
  for (int32_t i = 0; i < num_lanes(); ++i) {
    const int32_t* const offered = offer.lanes[static_cast<size_t>(i)];
    int64_t block = 0;
    for (const Step& step : path_) {
      const int32_t* const held = lane(step.node, i);
      for (int32_t k = 0; k < step.matched; ++k, ++block) {
        if (offered[block] != held[k] && offered[block] != kNullBlock) see(i, offered[block], block);
      }
    }
    for (; block < blocks; ++block) {
      if (offered[block] != kNullBlock) see(i, offered[block], block);
    }
  }
  for (const State& state : offer.states) {
    if (state_after(state.blocks) != state.id) see(num_lanes(), state.id, state.blocks - 1);
  }
}

}  // namespace pagecore
