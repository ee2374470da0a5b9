// Eviction of the model of RadixTree: the state of each cell by the eviction policies, and the nodes that are evicted.
#pragma once

#include <tuple>

#include "tests/index/native/radix_states.hpp"

namespace pagecore::test {

class ModelEviction : public ModelStates {
 public:
  using ModelStates::ModelStates;

  void advance(double time) { now = std::max(now, time); }

  // May evict more than `amount` of the full component if that holds no ids.
  Lanes evict(size_t c, int64_t amount) {
    Lanes out(num_lanes + 1);
    for (int64_t left = std::min(amount, evictable(c)); left > 0;) {
      const std::vector<int> worst = worst_node(c);
      if (c == 0) {
        left -= trim(worst, left, out);
        left -= prune();
        continue;
      }
      if (is_state(c)) clock = std::max(clock, deadline(cells.at(worst.back()).eviction[c]));
      if (is_state(c)) end_state(worst.back());
      int64_t taken = std::min(left, spare(worst.back(), c).second);
      for (const int cell : worst) {
        if (taken == 0 || count(cell, c) == 0) continue;
        --taken;
        int32_t& id = is_state(c) ? cells.at(cell).state : cells.at(cell).ids[full + c - 1];
        out[is_state(c) ? num_lanes : full + c - 1].push_back(id);
        id = is_state(c) ? radix::kNoState : kNullBlock;
        --left;
      }
      if (is_state(c) && state_of(worst.back()).is_branch) note_branch(cells.at(worst.back()).parent);
      prune();
    }
    return out;
  }

  // Evicts the end of a path back to `keep` blocks, until a cell that has children or is pinned.
  Lanes evict_path(int32_t space, const Prefix& prefix, int64_t keep, int64_t& gone) {
    Lanes out(num_lanes + 1);
    std::vector<int> found = find(space, prefix);
    const std::set<int> kept = pinned(0);
    for (gone = 0; std::ssize(found) > keep; ++gone, found.pop_back()) {
      if (!cells.at(found.back()).children.empty() || kept.contains(found.back())) break;
      trim({found.back()}, 1, out);
    }
    if (gone > 0 && !found.empty()) cells.at(found.back()).ends_node = true;
    prune();
    return out;
  }

  // Evicts every cell of a namespace whose subtree is not pinned.
  Lanes evict_namespace(int32_t space, int64_t& gone) {
    Lanes out(num_lanes + 1);
    const std::set<int> kept = pinned(0);
    gone = 0;
    for (std::vector<int> leaves = leaves_of(space, kept); !leaves.empty(); leaves = leaves_of(space, kept)) {
      for (const int leaf : leaves) {
        const int parent = cells.at(leaf).parent;
        gone += trim({leaf}, 1, out);
        if (parent >= 0) cells.at(parent).ends_node = true;
      }
    }
    return out;
  }

 protected:
  void touch(int cell, size_t c, bool is_hit) {
    cells.at(cell).eviction[c].used = turn;
    cells.at(cell).eviction[c].clock = clock;
    cells.at(cell).eviction[c].weight = weight(cells.at(cell).eviction[c]);
    cells.at(cell).eviction[c].hits += is_hit;
  }
  // Nodes with hits lose them, the least recently used first, while the others have the protected share.
  void limit_protected(size_t c) {
    while (true) {
      int64_t reused = 0, held = 0, oldest_count = 0;
      std::vector<int> oldest;
      for (const auto& [name, cell] : cells) {
        if (!cell.ends_node) continue;
        const std::vector<int> here = node(name);
        int64_t ids = 0;
        for (const int each : here) ids += count(each, c);
        held += ids;
        if (ids == 0 || cell.eviction[c].hits == 0) continue;
        reused += ids;
        const auto age = [&](int end) { return std::pair(cells.at(end).eviction[c].used, -std::ssize(path(end))); };
        if (!oldest.empty() && age(oldest.back()) < age(name)) continue;
        oldest = here;
        oldest_count = ids;
      }
      if (oldest.empty() || static_cast<double>(reused - oldest_count) < protected_share * static_cast<double>(held))
        return;
      ++turn;
      for (const int each : oldest) {
        cells.at(each).eviction[c].hits = 0;
        cells.at(each).eviction[c].used = turn;
      }
    }
  }
  void apply(const radix::RetentionHint& hint, ModelEvictionState& eviction) const {
    expire(eviction);
    if (std::pair(hint.priority, hint.expiry) > std::pair(eviction.priority, eviction.expiry)) {
      eviction.priority = hint.priority;
      eviction.expiry = hint.expiry;
    }
    if (hint.rank == hint.rank) eviction.rank = hint.rank;
  }
  void expire(ModelEvictionState& eviction) const {
    if (eviction.expiry > now) return;
    eviction.priority = 35;
    eviction.expiry = radix::kNever;
  }
  [[nodiscard]] ModelEvictionState fresh(const radix::RetentionHint& hint) const {
    ModelEvictionState eviction;
    eviction.used = eviction.made = turn;
    eviction.clock = clock;
    if (hint.priority == hint.priority) {
      eviction.priority = hint.priority;
      eviction.expiry = hint.expiry;
    }
    if (hint.rank == hint.rank) eviction.rank = hint.rank;
    return eviction;
  }
  static void inherit(ModelEvictionState& eviction, const ModelEvictionState& other) {
    eviction.priority = other.priority;
    eviction.expiry = other.expiry;
    eviction.rank = other.rank;
  }
  // Without full lanes, removes unpinned leaves without ids; returns the number of blocks removed.
  int64_t prune() {
    if (full > 0) return 0;
    const std::set<int> kept = pinned(0);
    Lanes nothing(num_lanes + 1);
    for (auto& [name, cell] : cells) {
      if (!cell.children.empty() || kept.contains(name)) continue;
      const std::vector<int> leaf = node(name);
      const bool is_empty = std::all_of(leaf.begin(), leaf.end(), [&](int each) {
        const Cell& it = cells.at(each);
        return it.state == radix::kNoState &&
               std::count(it.ids.begin(), it.ids.end(), kNullBlock) == std::ssize(it.ids);
      });
      if (!is_empty) continue;
      const int64_t gone = trim(leaf, INT64_MAX, nothing);
      return gone + prune();
    }
    return 0;
  }
  // Removes the last blocks of a leaf with all of their ids.
  int64_t trim(std::vector<int> leaf, int64_t most, Lanes& out) {
    int64_t gone = 0;
    for (; gone < most && !leaf.empty(); ++gone, leaf.pop_back()) {
      const Cell cell = cells.at(leaf.back());
      for (size_t lane = 0; lane < num_lanes; ++lane) {
        if (cell.ids[lane] != kNullBlock) out[lane].push_back(cell.ids[lane]);
      }
      if (cell.state != radix::kNoState) {
        out[num_lanes].push_back(cell.state);
        end_state(leaf.back());
      }
      auto& siblings = cell.parent < 0 ? roots[-1 - cell.parent] : cells.at(cell.parent).children;
      siblings.erase(cell.key);
      if (cell.parent < 0 && siblings.empty()) roots.erase(-1 - cell.parent);
      cells.erase(leaf.back());
    }
    if (!leaf.empty()) cells.at(leaf.back()).ends_node = true;
    return gone;
  }

  double turn = 0, clock = 0, now = -radix::kNever;

 private:
  [[nodiscard]] std::vector<int> leaves_of(int32_t space, const std::set<int>& kept) const {
    std::vector<int> leaves;
    for (const auto& [id, cell] : cells) {
      int top = id;
      while (top >= 0) top = cells.at(top).parent;
      if (-1 - top == space && cell.children.empty() && !kept.contains(id)) leaves.push_back(id);
    }
    return leaves;
  }
  // Rank and number of the ids that a node gives up at once.
  [[nodiscard]] std::pair<int, int64_t> spare(int end, size_t c) const {
    int64_t ids = 0;
    for (const int each : node(end)) ids += count(each, c);
    if (c == 0 || is_state(c) || policy == radix::Policy::Fifo || policy == radix::Policy::Mru ||
        policy == radix::Policy::Filo) {
      return {2, ids};
    }
    const int64_t depth = std::ssize(path(end));
    const int64_t needed = std::min(depth, std::max(depth - first_needed(c, depth), min_kept));
    const int64_t near = needed + 1024 / block_size;
    if (ids > near) return {0, ids - near};
    return ids > needed ? std::pair(1, ids - needed) : std::pair(2, ids);
  }
  [[nodiscard]] std::tuple<double, int, double, int64_t> worth(int end, size_t c) {
    const auto [primary, turn, depth] = order(end, c);
    if (c == 0 || is_state(c)) return {primary, 0, turn, depth};
    return {policy == radix::Policy::Lru ? 0 : primary, spare(end, c).first, turn, depth};
  }
  [[nodiscard]] std::tuple<double, double, int64_t> order(int end, size_t c) {
    ModelEvictionState& it = cells.at(end).eviction[c];
    expire(it);
    const int64_t depth = std::ssize(path(end)) - std::ssize(node(end));
    switch (policy) {
      case radix::Policy::Lru: return {deadline(it), it.used, depth};
      case radix::Policy::Lfu: return {it.hits, it.used, depth};
      case radix::Policy::Fifo: return {0, it.made, depth};
      case radix::Policy::Mru: return {0, -it.used, depth};
      case radix::Policy::Filo: return {0, -it.made, depth};
      case radix::Policy::Slru: return {it.is_branch || (it.hits > 0 && !it.is_passed), it.used, depth};
      case radix::Policy::Priority: return {it.priority, it.used, depth};
      case radix::Policy::Rank: return {it.rank, it.used, depth};
    }
    return {};
  }
  std::vector<int> worst_node(size_t c) {
    const std::set<int> kept = pinned(c);
    std::vector<int> worst;
    for (const auto& [name, cell] : cells) {
      if (!cell.ends_node || kept.contains(name) || (c == 0 && !cell.children.empty())) continue;
      const std::vector<int> here = node(name);
      const bool has_any = std::any_of(here.begin(), here.end(), [&](int each) { return count(each, c) > 0; });
      if (has_any && (worst.empty() || worth(name, c) < worth(worst.back(), c))) worst = here;
    }
    return worst;
  }
};

}  // namespace pagecore::test
