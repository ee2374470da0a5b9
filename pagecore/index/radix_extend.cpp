// A sequence that runs on: its node grows in place where nobody else is at it, and its windows move along.
//
//   before   A [0, 60) ── N [60, 100), receipt          a window of 40 blocks pins N
//   grown    A [0, 60) ── T [60, 61) ── N [61, 101)     T is split off and unpinned
//   joined   T [0, 61) ── N [61, 101)                   so that no chain of short nodes is left behind
//
// As in radix_insert.cpp, everything that can fail comes first.
#include <algorithm>
#include <limits>

#include "pagecore/index/radix_tree.hpp"

namespace pagecore {

using radix::kNoNode;
using radix::kNoState;

void RadixTree::extend(const Offer& offer, Receipt& receipt, Inserted& out) {
  const NodeId old = receipt.node;
  const NodeId parent = old == kNoNode ? -1 - offer.query.space : old;
  const int64_t old_end = depth(old);
  const int64_t blocks = static_cast<int64_t>(offer.query.tokens.size()) / block_size_;
  PC_EXPECTS(blocks >= old_end, ShapeError, offer.query.tokens.size(), " tokens are given and the receipt holds ",
             old_end * block_size_, "; give the whole sequence, from its start");
  survey(offer, parent, out);
  const int64_t fresh = blocks - out.old_blocks;
  const bool grows = fresh > 0 && can_grow(old);
  radix::Run run;
  try {
    reserve(3 + num_windows());
    if (grows) make_room(old, fresh);
    if (fresh > 0 && !grows) run = runs_.make(offer.query, out.old_blocks, fresh);
  } catch (...) {
    give_up_claims(out);
    throw;
  }
  advance(offer.time);
  if (blocks == old_end) return;
  ++turn_;  // all of it lies on one path, so that no two nodes tie
  if (grows) {
    grow(old, offer, static_cast<int32_t>(fresh));
    move_on(receipt, old, old_end, blocks);
    return;
  }
  const NodeId last = path_.empty() ? kNoNode : path_.back().node;
  const NodeId end = add_rest(offer, out, parent, std::move(run));
  if (fresh > 0 && old != kNoNode) inherit(end, old);
  use_path(offer);
  for (int32_t w = 1; w <= num_windows(); ++w) fill_window(offer, w);
  move_on(receipt, split_path(end, blocks), old_end, old_end);
  prune(last);  // the lower half of what was split keeps its id
}

// Whether the receipt that is at the node may make it longer: it is nobody else's end, and nothing is below it.
bool RadixTree::can_grow(NodeId node) const {
  return node >= 0 && at(node).children == 0 && at(node).receipts == 1 && at(node).state == kNoState;
}

// Room for so many blocks behind a leaf, which its run is to be filled with: half as much again, so that n blocks that
// come one by one cost O(n), and what is not in use stays within what compaction allows.
void RadixTree::make_room(NodeId leaf, int64_t blocks) {
  const radix::RunId id = at(leaf).run;
  const radix::Run& run = runs_[id];
  PC_ASSERT(at(leaf).next == kNoNode);
  if (int64_t{at(leaf).start} + at(leaf).size + blocks <= run.capacity) return;
  const int64_t live = run.live + blocks;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  PC_EXPECTS(live <= kMost, NotEnoughMemory, live, " blocks do not fit one run; use larger blocks");
  list_slices(run);
  runs_.resize(id, slices_, static_cast<int32_t>(std::min(live + live / 2, kMost)));
  place_slices(runs_[id]);
}

// A leaf takes the next blocks of the offer; what is known of its worth is from now on theirs too.
void RadixTree::grow(NodeId leaf, const Offer& offer, int32_t blocks) {
  Node& it = at(leaf);
  radix::Run& run = runs_[it.run];
  const int64_t first = depth(leaf);
  const int64_t end = int64_t{it.start} + it.size;
  // What was evicted behind it may have had marks; the new blocks have none.
  run.marks.erase(run.marks.begin() + (radix::first_mark_from(run.marks, end) - run.marks.data()), run.marks.end());
  std::copy_n(offer.query.tokens.data() + first * block_size_, blocks * block_size_,
              run.data.get() + end * block_size_);
  for (int32_t i = 0; i < num_lanes(); ++i) {
    std::copy_n(offer.lanes[static_cast<size_t>(i)] + first, blocks, runs_.lane(run, i) + end);
  }
  it.size += blocks;
  run.live += blocks;
  for (int32_t c = 0; c < num_components_; ++c) touch(leaf, c, false);
  change_count(leaf, 0, blocks);
  for (int32_t w = 1; w <= num_windows(); ++w) {
    const int32_t* const ids = runs_.lane(run, lane_of(w)) + end;
    change_count(leaf, w, blocks - static_cast<int32_t>(std::count(ids, ids + blocks, kNullBlock)));
  }
}

// What a sequence adds is worth what it ran on from, be it grown or a node of its own.
void RadixTree::inherit(NodeId node, NodeId from) {
  for (int32_t c = 0; c < num_components_; ++c) {
    radix::EvictionState& eviction = part(node, c).eviction;
    const radix::EvictionState& other = part(from, c).eviction;
    eviction.priority = other.priority;
    eviction.expiry = other.expiry;
    eviction.rank = other.rank;
    refresh(node, c);
  }
}

// The receipt goes down its path to `end`, which may be its own node grown; its pins reach down to `pinned_end`
// already. The state stays behind.
void RadixTree::move_on(Receipt& receipt, NodeId end, int64_t old_end, int64_t pinned_end) {
  const NodeId old = receipt.node;
  const radix::RetentionHint none;
  const auto holds = [&](int32_t component) { return (receipt.components >> component & 1) != 0; };
  if (has_states_) {
    if (old != kNoNode && holds(state_component())) pin(old, state_component(), -1, &none);
    receipt.components &= ~(1u << state_component());
  }
  receipt.components |= 1;
  for (int32_t w = 1; w <= num_windows(); ++w) {
    const int64_t start = window_start(w, depth(end));
    if (holds(w) && start > 0) static_cast<void>(split_path(end, start));
  }
  for (int32_t w = 1; w <= num_windows(); ++w) {
    if (holds(w)) move_window(receipt, end, w, old_end, pinned_end);
  }
  receipt.node = end;
  if (end != old) {
    ++at(end).receipts;
    pin_path(end, 1, nullptr);
    if (old != kNoNode) {
      --at(old).receipts;
      pin_path(old, -1, &none);  // it has a pinned child now: nothing is freed
    }
  }
  for (int32_t w = 1; w <= num_windows(); ++w) {
    const int64_t start = window_start(w, depth(end));
    if (!holds(w) || start == 0) continue;
    const NodeId left = split_path(end, start);
    while (can_join(at(left).parent, left)) join(at(left).parent, left);
  }
}

// Pins what the window has come to, and unpins what it has left; both are whole nodes.
void RadixTree::move_window(const Receipt& receipt, NodeId end, int32_t window, int64_t old_end, int64_t pinned_end) {
  const radix::RetentionHint none;
  const int64_t start = window_start(window, depth(end));
  const int64_t old_start = window_start(window, old_end);
  for (NodeId node = end; node >= 0 && depth(node) > old_start; node = at(node).parent) {
    const bool was_pinned = depth(node) <= pinned_end;
    const bool is_within = depth(node) > start;
    if (was_pinned != is_within) pin_part(node, window, is_within ? 1 : -1, &none);
  }
  if (receipt.node != kNoNode) --part(receipt.node, window).receipts;
  ++part(end, window).receipts;
}

// Whether a split between the two is of no more use: both are slices of one run, and the same receipts pin them.
bool RadixTree::can_join(NodeId upper, NodeId lower) const {
  if (upper < 0) return false;
  const Node& high = at(upper);
  const Node& low = at(lower);
  if (high.run != low.run || high.children != 1 || high.receipts != 0 || high.state != kNoState) return false;
  for (int32_t w = 1; w <= num_windows(); ++w) {
    if (part(upper, w).pins != part(lower, w).pins) return false;
  }
  return true;
}

// The opposite of split: the lower node keeps its id, and takes the place and the worth of the upper.
void RadixTree::join(NodeId upper, NodeId lower) {
  const Node high = at(upper);
  Node& low = at(lower);
  map_.erase(low.hash, lower);
  map_.replace(high.hash, upper, lower);
  unlink(upper);
  low.parent = high.parent;
  low.hash = high.hash;
  low.start = high.start;
  low.depth = high.depth;
  low.size += high.size;
  for (int32_t c = 0; c < num_components_; ++c) {
    heaps_[static_cast<size_t>(c)].erase(upper);
    if (policy_ == radix::Policy::Priority) expiries_[static_cast<size_t>(c)].erase(upper);
    if (c == state_component()) continue;
    part(lower, c).count += part(upper, c).count;
    part(lower, c).first = part(upper, c).first;
    part(lower, c).eviction = part(upper, c).eviction;
  }
  refresh_all(lower);  // its depth counts, too
  free_node(upper);
}

}  // namespace pagecore
