// Batches of insertions: all offers are accepted, or none.
//
//   fallible      claim the ids of every offer, compare what more than one offer has, reserve memory
//   infallible    insert_prepared() for each offer, in order
//
// Every offer is compared with the tree as it is before the batch. An insertion can change what a later offer finds:
// the path of the later offer grows if both have the same blocks after it, and a hole or a missing state is filled.
// Offers to which nothing of that can happen are settled; the others withdraw their claims and are compared again.
#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "pagecore/index/radix/tree/tree.hpp"

namespace pagecore {

namespace {

using radix::Ids;
using radix::Inserted;
using radix::NodeId;
using radix::Offer;
using radix::Suspects;

int64_t common_prefix(const radix::Query& a, const radix::Query& b, int64_t block_size) {
  if (a.space != b.space) return 0;
  const auto tokens = static_cast<int64_t>(std::min(a.tokens.size(), b.tokens.size()));
  const int64_t equal = radix::common_tokens(a.tokens.data(), b.tokens.data(), tokens);
  return radix::common_marks(a.marks, 0, b.marks, 0, equal / block_size);
}

// Places at which the offers of a batch put each suspect. An id has one place: the index of its block, in prefixes that
// are equal up to the end of that block.
class Places {
 public:
  Places(std::span<const Offer> offers, int64_t block_size, const Suspects& suspects)
      : offers_(offers), block_size_(block_size), suspects_(suspects), places_(suspects.all.size()) {}

  void check(int32_t lane, int32_t id, size_t offer, int64_t block) {
    if (!suspects_.all[static_cast<size_t>(lane)].holds(id)) return;
    const auto [found, is_new] = places_[static_cast<size_t>(lane)].try_emplace(id, Place{offer, block});
    if (is_new) return;
    const Place& other = found->second;
    PC_EXPECTS(other.block == block && (other.offer == offer || block < common(offer, other.offer)), DoubleFree,
               lane + 1 == std::ssize(places_) ? "state " : "block ", id,
               " is offered for two prefixes at once; offer only ids that hold the prefix");
  }

 private:
  struct Place {
    size_t offer;
    int64_t block;
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
  const Suspects& suspects_;
  std::vector<std::unordered_map<int32_t, Place>> places_;  // by lane, states last
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

// Room for every id of the offer.
void reserve_answer(const Offer& offer, Inserted& out) {
  for (std::vector<Ids>* lists : {&out.taken, &out.duplicates}) {
    for (Ids& ids : std::span(*lists).first(lists->size() - 1)) ids.reserve(static_cast<size_t>(out.blocks));
    lists->back().reserve(offer.states.size());
  }
}

}  // namespace

// Claims allocate the pages of their ids, so that a second claim of an offer that is not settled cannot fail.
void RadixTree::prepare_all(std::span<const Offer> offers, std::vector<Prepared>& batch) {
  batch.clear();
  batch.resize(offers.size());
  try {
    claim_all(offers, batch);
    settle(offers, batch);
    reserve_all(offers, batch);
  } catch (...) {
    for (Prepared& each : batch) claims_.withdraw(each.answer);
    throw;
  }
}

void RadixTree::insert_prepared(const Offer& offer, Receipt* receipt, Prepared& prepared) noexcept {
  Inserted& out = prepared.answer;
  if (prepared.is_settled) {
    nodes_.retrace(prepared.last, out.old_blocks, path_);
  } else {
    claims_.withdraw(out);
    survey(offer, radix::top_of(offer.query.space), out);
  }
  radix::NodeStorage storage;
  const int64_t fresh = out.blocks - out.old_blocks;
  if (fresh > 0) storage = nodes_.make_storage(offer.query, out.old_blocks, fresh, &prepared.storage);
  commit(offer, receipt, out, std::move(storage));
}

void RadixTree::claim_all(std::span<const Offer> offers, std::span<Prepared> batch) {
  Suspects suspects(static_cast<size_t>(num_lanes()) + 1);
  for (const Offer& offer : offers) check_namespace(offer.query.space);
  for (size_t i = 0; i < offers.size(); ++i) {
    survey(offers[i], radix::top_of(offers[i].query.space), batch[i].answer, &suspects);
    batch[i].last = path_.last();
  }
  if (suspects.has_any) check_suspects(offers, batch, suspects);
}

// Refuses a suspect that the tree holds at another place, or that the batch offers for two.
void RadixTree::check_suspects(std::span<const Offer> offers, std::span<const Prepared> batch, Suspects& suspects) {
  for (int32_t lane = 0; lane <= num_lanes(); ++lane) {
    radix::HeldIds& refused = suspects.refused[static_cast<size_t>(lane)];
    for (const Prepared& each : batch) {
      for (const int32_t id : each.answer.taken[static_cast<size_t>(lane)]) {
        if (refused.holds(id)) refused.erase(id);
      }
    }
    Ids held;
    refused.list(held);
    if (!held.empty()) claims_.refuse(lane, held.front());
  }
  Places places(offers, components_.block_size, suspects);
  for (size_t i = 0; i < offers.size(); ++i) {
    nodes_.retrace(batch[i].last, batch[i].answer.old_blocks, path_);
    for_each_id(nodes_, path_, offers[i], batch[i].answer.blocks,
                [&](int32_t lane, int32_t id, int64_t block) { places.check(lane, id, i, block); });
  }
}

// Offers that add a child at the same place meet: all but the first of them are not settled. Without full lanes a
// receipt that moves can also remove empty nodes from a path, and no offer is.
void RadixTree::settle(std::span<const Offer> offers, std::span<Prepared> batch) const {
  if (components_.full_lanes == 0) return;
  if (std::ranges::any_of(batch, [](const Prepared& each) { return each.answer.fills_path; })) return;
  std::vector<std::tuple<uint32_t, int64_t, size_t>> children;  // hash, place, offer
  children.reserve(offers.size());
  for (size_t i = 0; i < offers.size(); ++i) {
    const int64_t place = batch[i].answer.old_blocks;
    batch[i].is_settled = true;
    if (place == batch[i].answer.blocks) continue;
    const NodeId parent = batch[i].last == radix::kNoNode ? radix::top_of(offers[i].query.space) : batch[i].last;
    children.emplace_back(nodes_.child_hash(parent, offers[i].query, place), place, i);
  }
  std::sort(children.begin(), children.end());
  for (size_t i = 1; i < children.size(); ++i) {
    const auto& [hash, place, offer] = children[i];
    if (std::tie(hash, place) == std::tie(std::get<0>(children[i - 1]), std::get<1>(children[i - 1]))) {
      batch[offer].is_settled = false;
    }
  }
}

void RadixTree::reserve_all(std::span<const Offer> offers, std::span<Prepared> batch) {
  int64_t nodes = 0, longest = 0;
  for (const Offer& offer : offers) nodes += nodes_to_insert(offer);
  reserve(nodes);
  nodes_.reserve(nodes, offers.size());
  for (size_t i = 0; i < offers.size(); ++i) {
    Prepared& each = batch[i];
    if (!each.is_settled) reserve_answer(offers[i], each.answer);
    const int64_t first = components_.full_lanes > 0 ? each.answer.old_blocks : 0;
    const int64_t count = each.answer.blocks - first;
    if (count > 0) each.storage = nodes_.make_storage(offers[i].query, first, count);
    longest = std::max(longest, each.answer.blocks);
  }
  path_.steps.reserve(static_cast<size_t>(std::min(longest, num_nodes() + nodes)));
}

}  // namespace pagecore
