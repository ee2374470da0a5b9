// Model of RadixTree on a trie of cells: the oracle of the drivers. A value, like the other models.
#pragma once

#include <tuple>

#include "tests/index/native/radix_states.hpp"

namespace pagecore::test {

class ModelTree : public ModelStates {
 public:
  using ModelStates::ModelStates;

  // Receipts.

  int lock(const ModelMatch& match) {
    ++turn;
    note_reuse(match);
    const uint32_t all = (1u << num_components) - 1;
    if (match.blocks == 0) return new_receipt({-1, all, turn});
    const int end = match.path[static_cast<size_t>(match.blocks - 1)];
    cells.at(end).ends_node = true;
    const int receipt = new_receipt(lock_end(end, all, true));
    prune();
    return receipt;
  }
  int fork(int receipt) { return new_receipt(receipts.at(receipt)); }
  void unlock(int receipt, uint32_t components, const radix::RetentionHint& hint) {
    ++turn;
    drop(receipts.at(receipt), components, hint);
    if (receipts.at(receipt).components == 0) receipts.erase(receipt);
    prune();
  }
  void advance(double time) { now = std::max(now, time); }

  // Insertions. Lists of ids are by lane, states last.

  struct Inserted {
    int64_t old = 0;
    Lanes taken, duplicates;
  };
  Inserted insert(const ModelOffer& offer, int receipt) {
    const std::vector<int> known = find(offer.space, offer.prefix);
    Inserted out = sort_offer(offer, known, 0);
    ++turn;
    advance(offer.time);
    const int end = add_cells(offer, known, 0);
    const int below = offer.states.empty() ? end : node_end(end);
    for (size_t i = 0; i < offer.states.size(); ++i) give_state(offer, i, end, below);
    if (end >= 0) value_ranges(offer, path(end), known.size());
    if (receipt >= 0 && !offer.prefix.empty()) {
      cells.at(end).ends_node = true;
      move(receipts.at(receipt), end);
    }
    prune();
    return out;
  }

  // Ids before the end of the receipt are ignored.
  Inserted extend(const ModelOffer& offer, int name) {
    ModelReceipt& receipt = receipts.at(name);
    std::vector<int> known = path(receipt.end);
    const size_t old_end = known.size(), end = offer.prefix.size();
    expect(end >= old_end, ErrorKind::ShapeError);
    for (const int* next; known.size() < end && (next = child(offer.space, known, offer.prefix)) != nullptr;)
      known.push_back(*next);
    const Inserted out = sort_offer(offer, known, old_end);
    advance(offer.time);
    if (end == old_end) return out;
    ++turn;
    if (receipt.end < 0) receipt.since = turn;
    const int last = can_grow(receipt) ? grow(offer, receipt.end) : add_cells(offer, known, old_end);
    cells.at(last).ends_node = true;
    move_on(receipt, last);
    prune();
    return out;
  }

  // Eviction.

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
      for (const int cell : worst) {
        if (left == 0 || count(cell, c) == 0) continue;
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
  int new_receipt(ModelReceipt receipt) {
    receipts[next_receipt] = receipt;
    return next_receipt++;
  }
  static void expect(bool condition, ErrorKind kind) {
    if (!condition) fail(kind, "the model refuses");
  }
  void touch(int cell, size_t c, bool is_hit) {
    cells.at(cell).eviction[c].used = turn;
    cells.at(cell).eviction[c].clock = clock;
    cells.at(cell).eviction[c].weight = weight(cells.at(cell).eviction[c]);
    cells.at(cell).eviction[c].hits += is_hit;
  }
  void apply(const radix::RetentionHint& hint, ModelEvictionState& eviction) const {
    expire(eviction);
    if (hint.priority >= eviction.priority) {
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

  ModelReceipt lock_end(int end, uint32_t components, bool is_hit) {
    const std::vector<int> all = path(end);
    for (size_t c = 0; c < num_components; ++c) {
      if (c > 0 && !has(components, c)) continue;
      const auto first = static_cast<size_t>(first_needed(c, std::ssize(all)));
      if (is_window(c) && first > 0) cells.at(all[first - 1]).ends_node = true;
      for (size_t i = first; i < all.size(); ++i) touch(all[i], c, is_hit);
    }
    return {end, components, turn};
  }
  // Counts the end of a pin as a use.
  void touch_freed(const std::vector<std::set<int>>& before, const radix::RetentionHint& hint) {
    for (size_t c = 0; c < num_components; ++c) {
      const std::set<int> after = pinned(c);
      for (const int cell : before[c]) {
        if (after.contains(cell)) continue;
        touch(cell, c, false);
        apply(hint, cells.at(cell).eviction[c]);
      }
    }
  }
  void drop(ModelReceipt& receipt, uint32_t components, const radix::RetentionHint& hint) {
    const auto before = all_pinned();
    receipt.components &= ~components;
    const int end = receipt.end;
    if (receipt.components == 0) receipt.end = -1;
    touch_freed(before, hint);
    receipt.end = end;
  }
  void move(ModelReceipt& receipt, int end) {
    if (receipt.end == end) return;
    uint32_t components = receipt.components | 1;
    if (has_states) components &= ~(1u << (num_components - 1));
    ++turn;
    drop(receipt, ~0u, {});
    ++turn;
    receipt = lock_end(end, components, false);
  }

  // True for a leaf without a state that ends exactly one receipt, which inserted it if the policy looks at that; no
  // other hit it if the policy looks at hits.
  [[nodiscard]] bool can_grow(const ModelReceipt& receipt) const {
    using enum radix::Policy;
    const int end = receipt.end;
    if (end < 0 || !cells.at(end).children.empty()) return false;
    const bool by_insertion = policy == Fifo || policy == Filo || policy == Lfu || policy == Slru;
    if (by_insertion && cells.at(end).eviction[0].made < receipt.since) return false;
    if ((policy == Lfu || policy == Slru) && cells.at(end).eviction[0].hits > 0) return false;
    return receipts_at(end) == 1 && cells.at(end).state == radix::kNoState;
  }
  // Appends the blocks of the offer after the end of a node to the node.
  int grow(const ModelOffer& offer, int end) {
    for (const int cell : node(end)) {
      for (size_t c = 0; c < num_components; ++c) touch(cell, c, false);
    }
    const Cell old = cells.at(end);
    cells.at(end).ends_node = false;
    for (size_t i = path(end).size(); i < offer.prefix.size(); ++i)
      end = new_cell(offer, i, end, old.run, old.eviction);
    return end;
  }
  void move_on(ModelReceipt& receipt, int end) {
    auto before = all_pinned();
    const int old = receipt.end;
    // The blocks that a leaf has grown by are pinned like the leaf.
    for (int cell = end; old >= 0 && !cells.at(old).ends_node && cell != old; cell = cells.at(cell).parent) {
      for (std::set<int>& pinned : before) {
        if (pinned.contains(old)) pinned.insert(cell);
      }
    }
    receipt.end = end;
    receipt.components |= 1;
    if (has_states) receipt.components &= ~(1u << (num_components - 1));
    const std::vector<int> all = path(end);
    std::vector<int> starts;
    for (size_t w = 1; w <= windows.size(); ++w) {
      const int64_t first = has(receipt.components, w) ? first_needed(w, std::ssize(all)) : 0;
      if (first > 0) starts.push_back(all[static_cast<size_t>(first - 1)]);
    }
    for (const int start : starts) cells.at(start).ends_node = true;
    ++turn;
    touch_freed(before, {});
    for (const int start : starts) {
      while (join(start, receipt.since)) {
      }
    }
  }
  // Joins a node with its parent if both come from one insertion and the same receipts have used them; returns true if
  // so.
  bool join(int lower_end, double since) {
    const std::vector<int> low = node(lower_end);
    const int upper = cells.at(low.front()).parent;
    if (upper < 0) return false;
    const Cell& high = cells.at(upper);
    if (high.run != cells.at(low.front()).run || high.children.size() != 1 || receipts_at(upper) > 0) return false;
    if (high.state != radix::kNoState) return false;
    for (size_t w = 1; w <= windows.size(); ++w) {
      if (window_pins(upper, w) != window_pins(lower_end, w)) return false;
      if ((high.eviction[w].used >= since) != (cells.at(lower_end).eviction[w].used >= since)) return false;
    }
    for (const int cell : low) {
      for (size_t c = 0; c <= windows.size(); ++c) cells.at(cell).eviction[c] = high.eviction[c];
    }
    cells.at(upper).ends_node = false;
    if (has_states) repeat(lower_end);
    return true;
  }

  // Checks an offer in the order of the tree and sorts its ids into taken and duplicate ids.
  Inserted sort_offer(const ModelOffer& offer, const std::vector<int>& known, size_t from) const {
    const int64_t blocks = std::ssize(offer.prefix);
    expect(has_states || offer.states.empty(), ErrorKind::UnsupportedOption);
    for (int64_t before = 0; const auto& [end, id] : offer.states) {
      expect(end > before && end <= blocks, ErrorKind::ShapeError);
      before = end;
    }
    Inserted out{std::ssize(known), Lanes(num_lanes + 1), Lanes(num_lanes + 1)};
    for (size_t lane = 0; lane < num_lanes; ++lane) {
      std::set<int32_t> held = held_ids(lane);
      for (auto i = static_cast<int64_t>(from); i < blocks; ++i) {
        const int32_t offered = offer.lanes[lane][static_cast<size_t>(i)];
        const int32_t mine = i < out.old ? id_at(known[static_cast<size_t>(i)], lane) : kNullBlock;
        if (offered == kNullBlock && (i < out.old || lane >= full)) continue;
        if (mine != kNullBlock && mine == offered) continue;
        expect(offered > 0, ErrorKind::InvalidBlock);
        if (mine == kNullBlock) expect(held.insert(offered).second, ErrorKind::DoubleFree);
        (mine == kNullBlock ? out.taken : out.duplicates)[lane].push_back(offered);
      }
    }
    std::set<int32_t> held = held_ids(num_lanes);
    for (const auto& [end, id] : offer.states) {
      const int32_t mine = end <= out.old ? cells.at(known[static_cast<size_t>(end - 1)]).state : radix::kNoState;
      if (mine == id && id >= 0) continue;
      if (mine == radix::kNoState) {
        expect(id >= 0, ErrorKind::InvalidBlock);
        expect(held.insert(id).second, ErrorKind::DoubleFree);
      }
      (mine == radix::kNoState ? out.taken : out.duplicates)[num_lanes].push_back(id);
    }
    return out;
  }
  int new_cell(const ModelOffer& offer, size_t i, int parent, int run,
               const std::vector<ModelEvictionState>& eviction) {
    Cell cell{parent, offer.prefix[i], {}, {}, radix::kNoState, i + 1 == offer.prefix.size(), run, eviction};
    for (const Ids& lane : offer.lanes) cell.ids.push_back(lane[i]);
    (parent < 0 ? roots[-1 - parent] : cells.at(parent).children)[cell.key] = next_cell;
    cells[next_cell] = cell;
    return next_cell++;
  }
  // Marks the known blocks of a prefix from block `from` on as used, and adds the rest. Returns the last cell, or the
  // namespace for an empty prefix.
  int add_cells(const ModelOffer& offer, const std::vector<int>& known, size_t from) {
    int end = known.empty() ? -1 - offer.space : known.back();
    std::vector<ModelEvictionState> eviction(num_components, fresh(offer.hint));
    for (size_t c = 0; from > 0 && c < num_components; ++c) inherit(eviction[c], cells.at(known[from - 1]).eviction[c]);
    if (!known.empty()) cells.at(end).ends_node = true;  // blocks after the prefix are not used
    for (size_t i = from; i < known.size(); ++i) {
      for (size_t lane = full; lane < num_lanes; ++lane) {
        int32_t& mine = cells.at(known[i]).ids[lane];
        if (mine == kNullBlock) mine = offer.lanes[lane][i];
      }
    }
    const int run = next_cell;
    for (size_t i = known.size(); i < offer.prefix.size(); ++i) end = new_cell(offer, i, end, run, eviction);
    const bool is_longer = offer.prefix.size() > known.size() && !known.empty();
    if (has_states && is_longer && cells.at(known.back()).children.size() > 1) note_branch(known.back());
    for (size_t i = from; i < known.size(); ++i) {
      for (size_t c = 0; c < num_components; ++c) {
        touch(known[i], c, false);
        apply(offer.hint, cells.at(known[i]).eviction[c]);
      }
    }
    return end;
  }
  void value_ranges(const ModelOffer& offer, const std::vector<int>& cells_of, size_t num_known) {
    size_t range = 0;
    for (size_t i = 0; i < cells_of.size() && !offer.ranges.empty(); ++i) {
      while (offer.ranges[range].end <= static_cast<int64_t>(i)) ++range;
      const radix::RetentionHint& hint = offer.ranges[range].hint;
      for (ModelEvictionState& eviction : cells.at(cells_of[i]).eviction) {
        if (i < num_known) apply(hint, eviction);
        if (i >= num_known && hint.priority == hint.priority) {
          eviction.priority = hint.priority;
          eviction.expiry = hint.expiry;
        }
      }
      if (offer.ranges[range].end == static_cast<int64_t>(i) + 1) cells.at(cells_of[i]).ends_node = true;
    }
  }
  // The last cell of the node that holds a cell.
  [[nodiscard]] int node_end(int cell) const {
    while (cell >= 0 && !cells.at(cell).ends_node) cell = cells.at(cell).children.begin()->second;
    return cell;
  }
  static void inherit(ModelEvictionState& eviction, const ModelEvictionState& other) {
    eviction.priority = other.priority;
    eviction.expiry = other.expiry;
    eviction.rank = other.rank;
  }
  static std::set<int> as_set(const std::vector<int>& values) { return {values.begin(), values.end()}; }
  void give_state(const ModelOffer& offer, size_t which, int end, int below) {
    const auto& [blocks, id] = offer.states[which];
    Cell& cell = cells.at(path(end)[static_cast<size_t>(blocks - 1)]);
    cell.ends_node = true;
    if (cell.state != radix::kNoState) return;
    cell.state = id;
    place_state(path(end)[static_cast<size_t>(blocks - 1)], fresh(offer.hint), below);
  }

  [[nodiscard]] std::tuple<double, double, int64_t> worth(int end, size_t c) {
    ModelEvictionState& it = cells.at(end).eviction[c];
    expire(it);
    const int64_t depth = std::ssize(path(end)) - std::ssize(node(end));
    switch (policy) {
      case radix::Policy::Lru: return {deadline(it), it.used, depth};
      case radix::Policy::Lfu: return {it.hits, it.used, depth};
      case radix::Policy::Fifo: return {0, it.made, depth};
      case radix::Policy::Mru: return {0, -it.used, depth};
      case radix::Policy::Filo: return {0, -it.made, depth};
      case radix::Policy::Slru: return {it.hits > 0, it.used, depth};
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
  int next_cell = 0, next_receipt = 0;
};

}  // namespace pagecore::test
