// What a sequence has computed becomes what the tree holds, block by block where the tree lacks it.
//
// First everything that can fail: the walk, the checks, the claims (an id is noted as held; given up again where a
// later one is refused), the memory. Then nodes change, and nothing fails.
#include <algorithm>

#include "pagecore/index/radix_tree.hpp"

namespace pagecore {

using radix::kNoNode;
using radix::kNoState;

void RadixTree::insert(const Offer& offer, Receipt* receipt, Inserted& out, radix::Run* spare) {
  const NodeId top = -1 - offer.query.space;
  survey(offer, top, out);
  radix::Run run;
  try {
    reserve(3 + static_cast<int64_t>(offer.states.size()) + num_windows());
    const int64_t fresh = out.blocks - out.old_blocks;
    if (fresh > 0) run = runs_.make(offer.query, out.old_blocks, fresh, spare);
  } catch (...) {
    give_up_claims(out);
    throw;
  }
  ++turn_;
  advance(offer.time);
  const NodeId last = path_.empty() ? kNoNode : path_.back().node;
  const NodeId released = receipt != nullptr ? receipt->node : kNoNode;
  const NodeId end = add_rest(offer, out, top, std::move(run));
  use_path(offer);
  for (int32_t w = 1; w <= num_windows(); ++w) fill_window(offer, w);
  for (const State& state : offer.states) {
    const NodeId node = split_path(end, state.blocks);
    if (at(node).state != kNoState) continue;
    at(node).state = state.id;
    radix::EvictionState& eviction = part(node, state_component()).eviction;
    eviction = radix::EvictionState{};
    eviction.used = eviction.made = turn_;
    offer.hint.initialise(eviction);
    change_count(node, state_component(), 1);
  }
  if (receipt != nullptr && out.blocks > 0) move_receipt(*receipt, split_path(end, out.blocks));
  for (const NodeId node : {last, end, released}) prune(node);  // lower halves of splits keep their ids
}

// Walks the path on from `parent`, checks the offer, and claims what the tree is to take.
void RadixTree::survey(const Offer& offer, NodeId parent, Inserted& out) {
  const int64_t blocks = static_cast<int64_t>(offer.query.tokens.size()) / block_size_;
  check_states(offer, blocks);
  walk(offer, parent, blocks, out);
  out.taken.resize(static_cast<size_t>(num_lanes()) + 1);
  out.duplicates.resize(static_cast<size_t>(num_lanes()) + 1);
  for (Ids& ids : out.taken) ids.clear();
  for (Ids& ids : out.duplicates) ids.clear();
  try {
    for (int32_t i = 0; i < num_lanes(); ++i) claim_lane(offer, i, out);
    claim_states(offer, out);
  } catch (...) {
    give_up_claims(out);
    throw;
  }
}

void RadixTree::give_up_claims(const Inserted& out) {
  for (size_t i = 0; i < out.taken.size(); ++i) {
    for (const int32_t id : out.taken[i]) held_ids_[i].erase(id);
  }
}

void RadixTree::check_states(const Offer& offer, int64_t blocks) const {
  PC_EXPECTS(has_states_ || offer.states.empty(), UnsupportedOption, offer.states.size(),
             " states are given to a tree without them; make it with states=True");
  int64_t before = 0;
  for (const State& state : offer.states) {
    PC_EXPECTS(state.blocks > before && state.blocks <= blocks, ShapeError, "a state stands after ",
               state.blocks * block_size_, " tokens; give states in order, after whole blocks, up to ",
               blocks * block_size_, " tokens");
    before = state.blocks;
  }
}

void RadixTree::walk(const Offer& offer, NodeId parent, int64_t blocks, Inserted& out) {
  path_.clear();
  out.blocks = blocks;
  out.old_blocks = depth(parent);
  while (out.old_blocks < blocks) {
    const NodeId child = find_child(parent, offer.query, out.old_blocks);
    if (child == kNoNode) break;
    const int32_t matched = common_blocks(child, offer.query, out.old_blocks, blocks);
    path_.push_back({child, matched});
    out.old_blocks += matched;
    if (matched < at(child).size) break;
    parent = child;
  }
}

// `taken` has room.
void RadixTree::claim(int32_t lane, int32_t id, int32_t least, Ids& taken) {
  PC_EXPECTS(id >= least, InvalidBlock, lane == num_lanes() ? "state " : "block ", id,
             " cannot be cached; ids run from ", least, " on");
  PC_EXPECTS(held_ids_[static_cast<size_t>(lane)].add(id), DoubleFree, lane == num_lanes() ? "state " : "block ", id,
             " is in the tree already, at another place; offer only what its prefix has computed");
  taken.push_back(id);
}

// Sorts what is offered into what the tree takes and what it has from somebody else.
void RadixTree::claim_lane(const Offer& offer, int32_t which, Inserted& out) {
  const int32_t* const offered = offer.lanes[static_cast<size_t>(which)];
  Ids& taken = out.taken[static_cast<size_t>(which)];
  Ids& duplicates = out.duplicates[static_cast<size_t>(which)];
  const bool is_window = which >= full_lanes_;
  int64_t block = path_.empty() ? out.old_blocks : at(path_.front().node).depth;
  taken.reserve(static_cast<size_t>(out.blocks - (is_window ? block : out.old_blocks)));
  for (const Step& step : path_) {
    const int32_t* const held = lane(step.node, which);
    for (int32_t i = 0; i < step.matched; ++i, ++block) {
      if (offered[block] == held[i] || offered[block] == kNullBlock) continue;
      if (held[i] == kNullBlock) {
        claim(which, offered[block], 1, taken);
      } else {
        PC_EXPECTS(offered[block] > 0, InvalidBlock, "block ", offered[block], " cannot be cached; ids run from 1 on");
        duplicates.push_back(offered[block]);
      }
    }
  }
  for (; block < out.blocks; ++block) {
    if (is_window && offered[block] == kNullBlock) continue;
    claim(which, offered[block], 1, taken);
  }
}

// The state that the walked path has after so many blocks.
int32_t RadixTree::state_after(int64_t blocks) const {
  for (const Step& step : path_) {
    if (at(step.node).depth + at(step.node).size == blocks && step.matched == at(step.node).size) {
      return at(step.node).state;
    }
  }
  return kNoState;
}

void RadixTree::claim_states(const Offer& offer, Inserted& out) {
  out.taken.back().reserve(offer.states.size());
  for (const State& state : offer.states) {
    const int32_t held = state_after(state.blocks);
    if (held == kNoState) {
      claim(num_lanes(), state.id, 0, out.taken.back());
    } else if (held != state.id) {
      out.duplicates.back().push_back(state.id);
    }
  }
}

void RadixTree::use_path(const Offer& offer) {
  for (const Step& step : path_) {
    for (int32_t c = 0; c < num_components_; ++c) {
      touch(step.node, c, false);
      offer.hint.apply(part(step.node, c).eviction, now_);
      refresh(step.node, c);
    }
  }
}

// The new leaf, or where the path ends when the tree has it all. A node that the path leaves half way is split, and its
// upper half stands in the path.
RadixTree::NodeId RadixTree::add_rest(const Offer& offer, const Inserted& out, NodeId parent, radix::Run&& run) {
  NodeId end = path_.empty() ? parent : path_.back().node;
  if (out.old_blocks == out.blocks) return end;
  for (int32_t i = 0; i < num_lanes(); ++i) {
    std::copy_n(offer.lanes[static_cast<size_t>(i)] + out.old_blocks, run.capacity, runs_.lane(run, i));
  }
  if (!path_.empty() && path_.back().matched < at(end).size) path_.back().node = end = split(end, path_.back().matched);
  const NodeId leaf = add_leaf(end, offer.query, out.old_blocks, std::move(run));
  for (int32_t c = 0; c < num_components_; ++c) offer.hint.initialise(part(leaf, c).eviction);
  for (int32_t w = 1; w <= num_windows(); ++w) {
    const int32_t* const ids = lane(leaf, lane_of(w));
    change_count(leaf, w, at(leaf).size - static_cast<int32_t>(std::count(ids, ids + at(leaf).size, kNullBlock)));
  }
  refresh_all(leaf);
  return leaf;
}

// Puts ids where the path had holes.
void RadixTree::fill_window(const Offer& offer, int32_t window) {
  for (const Step& step : path_) {
    const int32_t* const offered = offer.lanes[static_cast<size_t>(lane_of(window))] + at(step.node).depth;
    int32_t* const held = lane(step.node, lane_of(window));
    int32_t filled = 0;
    for (int32_t i = 0; i < step.matched; ++i) {
      if (held[i] != kNullBlock || offered[i] == kNullBlock) continue;
      held[i] = offered[i];
      part(step.node, window).first = std::min(part(step.node, window).first, i);
      ++filled;
    }
    if (filled > 0) change_count(step.node, window, filled);
  }
}

void RadixTree::move_receipt(Receipt& receipt, NodeId end) {
  if (receipt.node == end) return;
  uint32_t components = receipt.components | 1;
  if (has_states_) components &= ~(1u << state_component());
  ++turn_;  // each path has a turn of its own, so that no two nodes tie
  drop(receipt, ~0u, radix::RetentionHint{});
  ++turn_;
  receipt = lock_end(end, components, false);
}

}  // namespace pagecore
