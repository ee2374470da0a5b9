// Insertion: the tree adds the blocks of an offer that it lacks.
//
//   fallible      walk the path, check the offer, claim ids, reserve memory      undone if a later step throws
//   infallible    add a leaf for the rest, mark the path as used, fill windows, add states, move the receipt
#include <algorithm>
#include <iterator>

#include "pagecore/index/radix/tree/tree.hpp"

namespace pagecore {

using radix::kNoNode;
using radix::kNoState;

void RadixTree::insert(const Offer& offer, Receipt* receipt, Inserted& out) {
  check_namespace(offer.query.space);
  survey(offer, radix::top_of(offer.query.space), out);
  radix::NodeStorage storage;
  try {
    reserve(nodes_to_insert(offer));
    const int64_t fresh = out.blocks - out.old_blocks;
    if (fresh > 0) storage = nodes_.make_storage(offer.query, out.old_blocks, fresh);
  } catch (...) {
    claims_.withdraw(out);
    throw;
  }
  commit(offer, receipt, out, std::move(storage));
}

// The infallible part: the path of the offer is in path_, its ids are claimed, and `storage` is for what the tree
// lacks.
void RadixTree::commit(const Offer& offer, Receipt* receipt, const Inserted& out, radix::NodeStorage&& storage) {
  queues_.begin_turn();
  advance(offer.time);
  const NodeId last = path_.last();
  const NodeId released = receipt != nullptr ? receipt->node : kNoNode;
  cut_path();
  const NodeId end = add_rest(offer, out, radix::top_of(offer.query.space), std::move(storage));
  for (const radix::PathStep& step : path_.steps) queues_.use(step.node, offer.hint);
  for (int32_t w = 1; w <= components_.num_windows(); ++w) fill_window(offer, w);
  for (const State& state : offer.states) add_state(end, state, offer.hint);
  if (!offer.ranges.empty()) value_ranges(offer, out, end);
  if (receipt != nullptr && out.blocks > 0) move_receipt(*receipt, structure_.split_path(end, out.blocks));
  for (const NodeId node : {last, end, released}) structure_.prune(node);  // lower halves of splits keep their ids
}

bool RadixTree::try_insert(const Offer& offer, Receipt& receipt, Inserted& out) noexcept {
  try {
    insert(offer, &receipt, out);
    return true;
  } catch (...) {
    return false;
  }
}

void RadixTree::check_namespace(radix::NamespaceId space) const {
  PC_EXPECTS(namespaces_.has(space), UnsupportedOption, "namespace ", space,
             " is not in use in this tree; insert into 0, or into a number that add_namespace() returned");
}

// Walks the path down from `parent` and claims the ids that the tree lacks.
void RadixTree::survey(const Offer& offer, NodeId parent, Inserted& out, radix::Suspects* suspects) {
  const int64_t blocks = static_cast<int64_t>(offer.query.tokens.size()) / components_.block_size;
  nodes_.walk(offer.query, parent, blocks, path_);
  claims_.claim(offer, blocks, path_, out, suspects);
}

// Splits the last node of the path if the offer leaves it half way, and replaces it in the path by its upper half: the
// blocks after it are not used.
void RadixTree::cut_path() {
  if (path_.steps.empty()) return;
  radix::PathStep& last = path_.steps.back();
  if (last.matched < nodes_.at(last.node).size) last.node = structure_.split(last.node, last.matched);
}

// Adds a leaf for the blocks that the tree lacks and returns it; returns the end of the path if it lacks none.
RadixTree::NodeId RadixTree::add_rest(const Offer& offer, const Inserted& out, NodeId parent,
                                      radix::NodeStorage&& storage) {
  const NodeId end = path_.steps.empty() ? parent : path_.last();
  if (out.old_blocks == out.blocks) return end;
  for (int32_t i = 0; i < num_lanes(); ++i) {
    std::copy_n(offer.lanes[static_cast<size_t>(i)] + out.old_blocks, storage.capacity, nodes_.lane_of(storage, i));
  }
  const NodeId leaf = nodes_.add_leaf(end, offer.query, out.old_blocks, std::move(storage));
  if (end >= 0) {
    queues_.refresh(end, 0);
    if (components_.has_states && nodes_.at(end).children > 1) branches_.note(end);
  } else {
    namespaces_.add_child(radix::namespace_of(end));
  }
  for (int32_t c = 0; c < num_components(); ++c) queues_.start(leaf, c, offer.hint);
  const int32_t size = nodes_.at(leaf).size;
  queues_.change_count(leaf, 0, size);
  for (int32_t w = 1; w <= components_.num_windows(); ++w) {
    const int32_t* const ids = nodes_.lane(leaf, components_.lane_of(w));
    queues_.change_count(leaf, w, size - static_cast<int32_t>(std::count(ids, ids + size, kNullBlock)));
  }
  journal_.note_new(leaf, 0, size);
  return leaf;
}

// Splits the path of an offer where its values change, and gives each node the value of its blocks.
void RadixTree::value_ranges(const Offer& offer, const Inserted& out, NodeId end) {
  for (const radix::HintRange& range : offer.ranges) {
    if (range.end > 0 && range.end < out.blocks) static_cast<void>(structure_.split_path(end, range.end));
  }
  auto range = offer.ranges.rbegin();
  for (NodeId node = end; node >= 0; node = nodes_.at(node).parent) {
    const int64_t first = nodes_.at(node).depth;
    while (std::next(range) != offer.ranges.rend() && std::next(range)->end > first) ++range;
    queues_.value(node, range->hint, first >= out.old_blocks);
  }
}

// Replaces the holes of a window on the path by offered ids.
void RadixTree::fill_window(const Offer& offer, int32_t window) {
  const int32_t lane = components_.lane_of(window);
  for (const radix::PathStep& step : path_.steps) {
    const int32_t* const offered = offer.lanes[static_cast<size_t>(lane)] + nodes_.at(step.node).depth;
    int32_t* const held = nodes_.lane(step.node, lane);
    int32_t filled = 0;
    for (int32_t i = 0; i < step.matched; ++i) {
      if (held[i] != kNullBlock || offered[i] == kNullBlock) continue;
      held[i] = offered[i];
      nodes_.part(step.node, window).first = std::min(nodes_.part(step.node, window).first, i);
      journal_.note_stored(window, step.node, i);
      ++filled;
    }
    if (filled > 0) queues_.change_count(step.node, window, filled);
  }
}

// Adds a state to a path that ends at or below it, unless the path has one there.
void RadixTree::add_state(NodeId end, const State& state, const radix::RetentionHint& hint) {
  const NodeId node = structure_.split_path(end, state.blocks);
  if (nodes_.at(node).state != kNoState) return;
  nodes_.at(node).state = state.id;
  queues_.start(node, components_.state(), hint);
  branches_.place_state(node, end);
  queues_.change_count(node, components_.state(), 1);
  journal_.note_stored(components_.state(), node, nodes_.at(node).size - 1);
}

// Moves a receipt to any node; its state is released, the full component is held from now on. Each of the two paths
// gets a turn of its own, so that no two nodes tie.
void RadixTree::move_receipt(Receipt& receipt, NodeId end) {
  if (receipt.node == end) return;
  const uint32_t components = (receipt.components | 1) & ~components_.state_bit();
  queues_.begin_turn();
  pins_.release(receipt, components_.all(), {});
  queues_.begin_turn();
  receipt = lock_end(end, components, false);
}

}  // namespace pagecore
