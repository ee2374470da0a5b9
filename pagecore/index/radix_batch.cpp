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

// Ids that are claimed and given up again have their pages from then on. Those before an offer in the batch may add to
// what the tree has of it; in a tree without full lanes a receipt that moves may also take from it what holds nothing.
void RadixTree::prepare_all(std::span<const Offer> offers, Batch& batch) {
  batch.answers.resize(offers.size());
  batch.runs.resize(offers.size());
  check_places(offers, batch.answers);
  int64_t nodes = 0;
  for (const Offer& offer : offers) nodes += 3 + static_cast<int64_t>(offer.states.size()) + num_windows();
  reserve(nodes);
  runs_.reserve(offers.size());
  int64_t longest = 0;
  for (size_t i = 0; i < offers.size(); ++i) {
    Inserted& out = batch.answers[i];
    reserve_answer(offers[i], out);
    const int64_t old_blocks = full_lanes_ > 0 ? out.old_blocks : 0;
    if (old_blocks < out.blocks) batch.runs[i] = runs_.make(offers[i].query, old_blocks, out.blocks - old_blocks);
    longest = std::max(longest, out.blocks);
  }
  path_.reserve(static_cast<size_t>(std::min(longest, num_nodes() + nodes)));
}

void RadixTree::check_places(std::span<const Offer> offers, std::span<Inserted> answers) {
  Places places(offers, block_size_, num_lanes());
  for (size_t i = 0; i < offers.size(); ++i) {
    survey(offers[i], -1 - offers[i].query.space, answers[i]);
    give_up_claims(answers[i]);
    if (offers.size() == 1) return;
    see_places(offers[i], answers[i].blocks, [&](int32_t lane, int32_t id, int64_t) { places.note(lane, id); });
  }
  if (!places.has_any()) return;
  Inserted walked;
  for (size_t i = 0; i < offers.size(); ++i) {
    walk(offers[i], -1 - offers[i].query.space, answers[i].blocks, walked);
    see_places(offers[i], walked.blocks,
               [&](int32_t lane, int32_t id, int64_t block) { places.want(lane, id, i, block); });
  }
}

// Whatever the tree has of the offer when it is inserted.
void RadixTree::reserve_answer(const Offer& offer, Inserted& out) const {
  for (std::vector<Ids>* lists : {&out.taken, &out.duplicates}) {
    for (Ids& ids : std::span(*lists).first(lists->size() - 1)) ids.reserve(static_cast<size_t>(out.blocks));
    lists->back().reserve(offer.states.size());
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
