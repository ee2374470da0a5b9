// Extension of a sequence from the end of its receipt. A leaf that only this receipt uses grows in place; the windows
// of the receipt move along.
//
//   before   A [0, 60) ── N [60, 100), receipt          a window of 40 blocks pins N
//   grown    A [0, 60) ── T [60, 61) ── N [61, 101)     T is split off and unpinned
//   joined   T [0, 61) ── N [61, 101)                   A and T are joined, so that short nodes do not pile up
//
// The fallible part comes first, as in insert.cpp.
#include <algorithm>

#include "pagecore/index/radix/tree/tree.hpp"

namespace pagecore {

using radix::kNoNode;
using radix::kNoState;

namespace {

using radix::EvictionQueues;
using radix::Node;
using radix::NodeId;
using radix::NodeStore;

// True if the node is a leaf without a state that ends exactly one receipt. Under a policy that looks at insertions or
// hits, the receipt also inserted the leaf, at turn `since` or later, and nothing hit it since then: new blocks have
// neither the age nor the hits of old ones.
bool can_grow(const NodeStore& nodes, const EvictionQueues& queues, NodeId node, uint64_t since) {
  if (node < 0) return false;
  if (queues.looks_at_insertions() && nodes.part(node, 0).eviction.made < since) return false;
  if (queues.looks_at_hits() && nodes.part(node, 0).eviction.hits > 0) return false;
  const Node& it = nodes.at(node);
  return it.children == 0 && it.receipts == 1 && it.state == kNoState;
}

// True if nodes above a window can be one: a receipt has used both since the given turn, or neither. What other
// receipts used before is older, and would make the used blocks as old.
bool can_join(const NodeStore& nodes, NodeId upper, NodeId lower, uint64_t since) {
  if (!nodes.can_join(upper, lower)) return false;
  for (int32_t w = 1; w <= nodes.components().num_windows(); ++w) {
    const bool is_used = nodes.part(upper, w).eviction.used >= since;
    if (is_used != (nodes.part(lower, w).eviction.used >= since)) return false;
  }
  return true;
}

}  // namespace

void RadixTree::extend(const Offer& offer, Receipt& receipt, Inserted& out) {
  const NodeId old = receipt.node;
  const NodeId parent = old == kNoNode ? radix::top_of(offer.query.space) : old;
  const int64_t old_end = nodes_.end(old);
  const int64_t blocks = static_cast<int64_t>(offer.query.tokens.size()) / components_.block_size;
  PC_EXPECTS(blocks >= old_end, ShapeError, "the receipt holds ", old_end * components_.block_size, " tokens, got ",
             offer.query.tokens.size(), "; give the whole sequence, from its start");
  survey(offer, parent, out);
  const int64_t fresh = blocks - out.old_blocks;
  const bool grows = fresh > 0 && can_grow(nodes_, queues_, old, receipt.since);
  radix::NodeStorage storage;
  try {
    reserve(3 + components_.num_cuts());
    if (grows) nodes_.make_room(old, fresh);
    if (fresh > 0 && !grows) storage = nodes_.make_storage(offer.query, out.old_blocks, fresh);
  } catch (...) {
    claims_.withdraw(out);
    throw;
  }
  advance(offer.time);
  if (blocks == old_end) return;
  queues_.begin_turn();  // one turn for one path: no two nodes tie
  if (old == kNoNode) receipt.since = queues_.turn();
  if (grows) {
    grow(old, offer, static_cast<int32_t>(fresh));
    move_on(receipt, old, old_end, blocks);
    return;
  }
  const NodeId last = path_.last();
  cut_path();
  const NodeId end = add_rest(offer, out, parent, std::move(storage));
  if (fresh > 0 && old != kNoNode) queues_.inherit(end, old);
  for (const radix::PathStep& step : path_.steps) queues_.use(step.node, offer.hint);
  for (int32_t w = 1; w <= components_.num_windows(); ++w) fill_window(offer, w);
  move_on(receipt, structure_.split_path(end, blocks), old_end, old_end);
  structure_.prune(last);  // the lower half of a split keeps its id
}

bool RadixTree::try_extend(const Offer& offer, Receipt& receipt, Inserted& out) noexcept {
  try {
    extend(offer, receipt, out);
    return true;
  } catch (...) {
    return false;
  }
}

// Appends the next blocks of an offer to a leaf; they share its eviction state.
void RadixTree::grow(NodeId leaf, const Offer& offer, int32_t blocks) {
  const int64_t first = nodes_.end(leaf);
  nodes_.append(leaf, offer.query, offer.lanes, blocks);
  for (int32_t c = 0; c < num_components(); ++c) queues_.touch(leaf, c, false);
  queues_.change_count(leaf, 0, blocks);
  for (int32_t w = 1; w <= components_.num_windows(); ++w) {
    const int32_t* const ids = offer.lanes[static_cast<size_t>(components_.lane_of(w))] + first;
    queues_.change_count(leaf, w, blocks - static_cast<int32_t>(std::count(ids, ids + blocks, kNullBlock)));
  }
  journal_.note_new(leaf, nodes_.at(leaf).size - blocks, blocks);
}

// Moves the receipt down its path to `end`, as Pins::move_down(); splits and joins nodes where its windows begin.
void RadixTree::move_on(Receipt& receipt, NodeId end, int64_t old_end, int64_t pinned_end) {
  const auto start_of = [&](int32_t window) {
    if (!radix::has_component(receipt.components, window)) return int64_t{0};
    return components_.window_start(window, nodes_.end(end));
  };
  for (int32_t w = 1; w <= components_.num_windows(); ++w) {
    if (start_of(w) > 0) structure_.split_window(end, w);
  }
  queues_.begin_turn();  // what the windows leave was in use until now, unlike new blocks before them
  pins_.move_down(receipt, end, old_end, pinned_end);
  for (int32_t w = 1; w <= components_.num_windows(); ++w) {
    if (start_of(w) == 0) continue;
    const NodeId lower = structure_.split_path(end, start_of(w));
    for (NodeId upper = nodes_.at(lower).parent; can_join(nodes_, upper, lower, receipt.since);
         upper = nodes_.at(lower).parent) {
      queues_.remove(upper);
      queues_.leave_protected(lower);
      nodes_.join(upper, lower);
      queues_.refresh(lower);  // its depth has changed, too
    }
  }
}

}  // namespace pagecore
