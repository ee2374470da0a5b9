// Contents of the model of a radix tree: a trie with one cell for each cached block. Nothing here changes the model.
//
// A node of the tree is a chain of cells, the last of which has `ends_node` set. Fields of a node are repeated in each
// of its cells, so that splitting a node only sets a flag. Nodes matter because eviction orders and trims whole nodes;
// drivers compare only observable state.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <vector>

#include "pagecore/index/radix/tree/tree.hpp"
#include "tests/native/harness.hpp"

namespace pagecore::test {

using Tokens = std::vector<int32_t>;
using Ids = std::vector<int32_t>;
using Lanes = std::vector<Ids>;

// Lookup key of a block: its tokens, and (start, end, digest) of each span that overlaps it.
using BlockKey = std::pair<Tokens, std::vector<std::array<int64_t, 3>>>;
using Prefix = std::vector<BlockKey>;

struct ModelEvictionState {
  double used = 0, made = 0, hits = 0;
  double priority = 35, expiry = radix::kNever, rank = 0;
  // Of states: the clock and the weight at the last use; their kind; the blocks since the last state, and since the
  // last before a branch; those before it, once it is evicted.
  double clock = 0, weight = 0;
  bool is_branch = false, has_next = false, is_passed = false, is_reused = false;
  double after_state = 0, after_branch = 0, evicted_after = 0;
};

struct Cell {
  int parent = -1;  // -1 - namespace at the top
  BlockKey key;
  std::map<BlockKey, int> children;
  Ids ids;  // by lane
  int32_t state = radix::kNoState;
  bool ends_node = false;
  int run = 0;                               // insertion that made it; splits keep it
  std::vector<ModelEvictionState> eviction;  // by component
};

struct ModelReceipt {
  int end = -1;
  uint32_t components = 0;
  double since = 0;  // turn in which its first blocks were pinned
};

struct ModelOffer {
  int32_t space = 0;
  Prefix prefix;
  Lanes lanes;
  std::vector<std::pair<int64_t, int32_t>> states;
  radix::RetentionHint hint;
  double time = -radix::kNever;
  std::vector<radix::HintRange> ranges;
};

struct ModelMatch {
  std::vector<int> path;  // every cached block of the prefix
  int64_t blocks = 0;     // reusable by every component
  int64_t checkpoint = 0;
  int32_t state = radix::kNoState;
  Lanes ids;
};

class ModelCells {
 public:
  explicit ModelCells(const RadixTree::Options& options)
      : block_size(options.block_size),
        interval(options.state_interval),
        min_kept(options.min_kept),
        full(static_cast<size_t>(options.full_lanes)),
        has_states(options.has_states),
        policy(options.policy),
        protected_share(options.protected_share) {
    for (const int64_t window : options.windows) windows.push_back((window + block_size - 1) / block_size);
    num_lanes = full + windows.size();
    num_components = 1 + windows.size() + (has_states ? 1 : 0);
  }

  int64_t block_size, interval, min_kept;
  size_t full;
  bool has_states;
  radix::Policy policy;
  double protected_share;
  std::vector<int64_t> windows;  // in blocks
  size_t num_lanes, num_components;
  std::map<int, Cell> cells;
  std::map<int32_t, std::map<BlockKey, int>> roots;  // by namespace, without empty ones
  std::map<int, ModelReceipt> receipts;

  // Lookup.

  [[nodiscard]] bool is_window(size_t c) const { return c >= 1 && c <= windows.size(); }
  [[nodiscard]] bool is_state(size_t c) const { return has_states && c + 1 == num_components; }
  [[nodiscard]] static bool has(uint32_t components, size_t c) { return (components >> c & 1) != 0; }

  // Returns the cells from the top to this one.
  [[nodiscard]] std::vector<int> path(int cell) const {
    std::vector<int> up;
    for (; cell >= 0; cell = cells.at(cell).parent) up.push_back(cell);
    return {up.rbegin(), up.rend()};
  }
  // Returns the cells of the node of a cell.
  [[nodiscard]] std::vector<int> node(int cell) const {
    while (!cells.at(cell).ends_node) cell = cells.at(cell).children.begin()->second;
    std::vector<int> up{cell};
    for (int above = cells.at(cell).parent; above >= 0 && !cells.at(above).ends_node; above = cells.at(above).parent)
      up.push_back(above);
    return {up.rbegin(), up.rend()};
  }
  [[nodiscard]] std::vector<int> find(int32_t space, const Prefix& prefix) const {
    std::vector<int> found;
    for (const int* next; found.size() < prefix.size() && (next = child(space, found, prefix)) != nullptr;)
      found.push_back(*next);
    return found;
  }
  // Returns the cell that follows those found of a prefix, or null.
  [[nodiscard]] const int* child(int32_t space, const std::vector<int>& found, const Prefix& prefix) const {
    if (found.empty() && !roots.contains(space)) return nullptr;
    const auto& children = found.empty() ? roots.at(space) : cells.at(found.back()).children;
    const auto next = children.find(prefix[found.size()]);
    return next == children.end() ? nullptr : &next->second;
  }
  // First of the blocks [first, end) that a component needs to reuse a prefix of `end` blocks.
  [[nodiscard]] int64_t first_needed(size_t c, int64_t end) const {
    if (c == 0) return 0;
    return is_state(c) ? end - 1 : std::max<int64_t>(0, end - windows[c - 1]);
  }
  [[nodiscard]] int32_t id_at(int cell, size_t lane) const { return cells.at(cell).ids[lane]; }

  [[nodiscard]] ModelMatch match(int32_t space, Prefix prefix, int64_t limit) const {
    prefix.resize(std::min(prefix.size(), static_cast<size_t>(limit)));
    ModelMatch match;
    match.path = find(space, prefix);
    for (int64_t end = 1; end <= std::ssize(match.path); ++end) {
      bool is_whole = true;
      for (size_t w = 1; w <= windows.size(); ++w) {
        for (int64_t i = first_needed(w, end); i < end; ++i)
          is_whole = is_whole && id_at(match.path[static_cast<size_t>(i)], full + w - 1) != kNullBlock;
      }
      const int32_t state = cells.at(match.path[static_cast<size_t>(end - 1)]).state;
      if (!is_whole || (has_states && state == radix::kNoState)) continue;
      match.blocks = end;
      match.state = state;
    }
    for (size_t lane = 0; lane < num_lanes; ++lane) match.ids.push_back(ids_of(match.path, match.blocks, lane));
    if (has_states) match.checkpoint = std::ssize(match.path) * block_size / interval * interval;
    if (match.checkpoint <= match.blocks * block_size) match.checkpoint = 0;
    return match;
  }
  [[nodiscard]] Ids ids_of(const std::vector<int>& path, int64_t end, size_t lane) const {
    Ids ids(static_cast<size_t>(end), kNullBlock);
    for (int64_t i = lane < full ? 0 : first_needed(lane - full + 1, end); i < end; ++i)
      ids[static_cast<size_t>(i)] = id_at(path[static_cast<size_t>(i)], lane);
    return ids;
  }

  // Sizes and pins.

  [[nodiscard]] int64_t count(int cell, size_t c) const {
    if (is_state(c)) return cells.at(cell).state != radix::kNoState;
    return c == 0 || id_at(cell, full + c - 1) != kNullBlock;
  }
  [[nodiscard]] std::set<int> pinned(size_t c) const {
    std::set<int> pinned;
    for (const auto& [name, receipt] : receipts) {
      if (receipt.end < 0 || (c > 0 && !has(receipt.components, c))) continue;
      const std::vector<int> all = path(receipt.end);
      pinned.insert(all.begin() + first_needed(c, std::ssize(all)), all.end());
    }
    return pinned;
  }
  [[nodiscard]] std::vector<std::set<int>> all_pinned() const {
    std::vector<std::set<int>> pinned_cells;
    for (size_t c = 0; c < num_components; ++c) pinned_cells.push_back(pinned(c));
    return pinned_cells;
  }
  // Receipts that pin a window at a cell.
  [[nodiscard]] int64_t window_pins(int cell, size_t w) const {
    return std::count_if(receipts.begin(), receipts.end(), [&](const auto& each) {
      if (each.second.end < 0 || !has(each.second.components, w)) return false;
      const std::vector<int> all = path(each.second.end);
      return std::find(all.begin() + first_needed(w, std::ssize(all)), all.end(), cell) != all.end();
    });
  }
  [[nodiscard]] int64_t receipts_at(int cell) const {
    return std::count_if(receipts.begin(), receipts.end(), [&](const auto& each) { return each.second.end == cell; });
  }
  [[nodiscard]] int64_t held(size_t c) const {
    int64_t sum = 0;
    for (const auto& [name, cell] : cells) sum += count(name, c);
    return sum;
  }
  [[nodiscard]] int64_t evictable(size_t c) const {
    const std::set<int> kept = pinned(c);
    int64_t sum = 0;
    for (const auto& [name, cell] : cells) sum += kept.contains(name) ? 0 : count(name, c);
    return sum;
  }
  [[nodiscard]] std::set<int32_t> held_ids(size_t lane) const {
    std::set<int32_t> ids;
    for (const auto& [name, cell] : cells) {
      const int32_t id = lane == num_lanes ? cell.state : cell.ids[lane];
      if (id != (lane == num_lanes ? radix::kNoState : kNullBlock)) ids.insert(id);
    }
    return ids;
  }
};

}  // namespace pagecore::test
