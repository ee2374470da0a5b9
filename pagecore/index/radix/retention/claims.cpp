#include "pagecore/index/radix/retention/claims.hpp"

#include <algorithm>

namespace pagecore::radix {

namespace {

void note_duplicate(int32_t lane, int32_t id, Suspects* suspects) {
  if (suspects == nullptr) return;
  static_cast<void>(suspects->all[static_cast<size_t>(lane)].add(id));
  suspects->has_any = true;
}

}  // namespace

void Claims::claim(const Offer& offer, int64_t blocks, const Path& path, Inserted& out, Suspects* suspects) {
  check_states(offer, blocks);
  out.blocks = blocks;
  out.old_blocks = path.end;
  out.fills_path = false;
  for (std::vector<Ids>* lists : {&out.taken, &out.duplicates}) {
    lists->resize(held_.size());
    for (Ids& ids : *lists) ids.clear();
  }
  try {
    for (int32_t i = 0; i < nodes_.components().num_lanes(); ++i) claim_lane(offer, i, path, out, suspects);
    claim_states(offer, path, out, suspects);
  } catch (...) {
    withdraw(out);
    throw;
  }
}

void Claims::withdraw(Inserted& out) {
  for (size_t i = 0; i < out.taken.size(); ++i) {
    held_[i].erase(out.taken[i]);
    out.taken[i].clear();
  }
}

void Claims::refuse(int32_t lane, int32_t id) const {
  fail(ErrorKind::DoubleFree, kind_of(lane), id,
       " is in the tree already, at another place; offer only ids that hold this prefix");
}

void Claims::check_states(const Offer& offer, int64_t blocks) const {
  PC_EXPECTS(nodes_.components().has_states || offer.states.empty(), UnsupportedOption, offer.states.size(),
             " states are given to a tree without states; make the tree with states=True");
  const int64_t block_size = nodes_.components().block_size;
  int64_t before = 0;
  for (const State& state : offer.states) {
    PC_EXPECTS(state.blocks > before && state.blocks <= blocks, ShapeError, "a state follows ",
               state.blocks * block_size, " tokens; expected ascending lengths from ", block_size, " to ",
               blocks * block_size);
    before = state.blocks;
  }
}

void Claims::not_added(int32_t lane, int32_t id, int32_t min_id, Suspects* suspects) const {
  PC_EXPECTS(id >= min_id, InvalidBlock, kind_of(lane), id, " cannot be cached; expected ids >= ", min_id);
  if (suspects == nullptr) refuse(lane, id);
  static_cast<void>(suspects->refused[static_cast<size_t>(lane)].add(id));
  static_cast<void>(suspects->all[static_cast<size_t>(lane)].add(id));
  suspects->has_any = true;
}

void Claims::claim_lane(const Offer& offer, int32_t lane, const Path& path, Inserted& out, Suspects* suspects) {
  const int32_t* const offered = offer.lanes[static_cast<size_t>(lane)];
  Ids& taken = out.taken[static_cast<size_t>(lane)];
  Ids& duplicates = out.duplicates[static_cast<size_t>(lane)];
  const bool is_window = lane >= nodes_.components().full_lanes;
  taken.reserve(static_cast<size_t>(out.blocks - (is_window ? path.start : path.end)));
  int64_t block = path.start;
  for (const PathStep& step : path.steps) {
    const int32_t* const held = nodes_.lane(step.node, lane);
    for (int32_t i = 0; i < step.matched; ++i, ++block) {
      const int64_t equal = common_tokens(held + i, offered + block, step.matched - i);
      i += static_cast<int32_t>(equal);
      block += equal;
      if (i == step.matched) break;
      if (offered[block] == kNullBlock) continue;
      if (held[i] == kNullBlock) {
        add(lane, offered[block], 1, taken, suspects);
        out.fills_path = true;
      } else {
        PC_EXPECTS(offered[block] > 0, InvalidBlock, "block ", offered[block], " cannot be cached; expected ids >= 1");
        duplicates.push_back(offered[block]);
        note_duplicate(lane, offered[block], suspects);
      }
    }
  }
  // A run that has a held id is measured to its end in vain. After each, the next one is sought later.
  constexpr int64_t kMostAlone = 1024;
  int64_t next_run = block, alone = 1;
  while (block < out.blocks) {
    const std::span rest(offered + block, static_cast<size_t>(out.blocks - block));
    if (block >= next_run && rest[0] >= 1) {
      if (const size_t run = held(lane).add_run(rest); run > 0) {
        taken.insert(taken.end(), rest.begin(), rest.begin() + static_cast<ptrdiff_t>(run));
        block += static_cast<int64_t>(run);
        next_run = block;
        alone = 1;
        continue;
      }
      next_run = block + alone;
      alone = std::min(2 * alone, kMostAlone);
    }
    if (!is_window || rest[0] != kNullBlock) add(lane, rest[0], 1, taken, suspects);
    ++block;
  }
}

void Claims::claim_states(const Offer& offer, const Path& path, Inserted& out, Suspects* suspects) {
  const int32_t lane = nodes_.components().num_lanes();
  out.taken.back().reserve(offer.states.size());
  for (const State& state : offer.states) {
    const int32_t held = nodes_.state_after(path, state.blocks);
    if (held == kNoState) {
      add(lane, state.id, 0, out.taken.back(), suspects);
      out.fills_path = out.fills_path || state.blocks <= path.end;
    } else if (held != state.id) {
      out.duplicates.back().push_back(state.id);
      note_duplicate(lane, state.id, suspects);
    }
  }
}

void Claims::shrink() noexcept {
  for (HeldIds& ids : held_) ids.shrink();
}

size_t Claims::nbytes() const {
  size_t total = 0;
  for (const HeldIds& ids : held_) total += ids.nbytes();
  return total;
}

void Claims::check_invariants() const {
  const Components& components = nodes_.components();
  for (int32_t i = 0; i <= components.num_lanes(); ++i) {
    Ids ids;
    for (NodeId node = 0; node < nodes_.num_ids(); ++node) {
      const Node& it = nodes_.at(node);
      if (it.size == 0) continue;
      if (i == components.num_lanes()) {
        if (it.state != kNoState) ids.push_back(it.state);
        continue;
      }
      for (int32_t j = 0; j < it.size; ++j) {
        const int32_t id = nodes_.lane(node, i)[j];
        if (id != kNullBlock) ids.push_back(id);
        PC_ASSERT(i >= components.full_lanes || id > kNullBlock);
      }
    }
    std::sort(ids.begin(), ids.end());
    PC_ASSERT(std::adjacent_find(ids.begin(), ids.end()) == ids.end());
    PC_ASSERT(static_cast<int64_t>(ids.size()) == held(i).count());
    PC_ASSERT(std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return held(i).holds(id); }));
  }
}

}  // namespace pagecore::radix
