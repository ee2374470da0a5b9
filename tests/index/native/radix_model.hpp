// Model of RadixTree on a trie of cells: the oracle of the drivers. A value, like the other models.
#pragma once

#include "tests/index/native/radix_eviction.hpp"

namespace pagecore::test {

class ModelTree : public ModelEviction {
 public:
  using ModelEviction::ModelEviction;

  // Receipts.

  int lock(const ModelMatch& match) {
    const int receipt = pin(match);
    if (match.blocks == 0) return receipt;
    prune();
    limit_all_protected();
    return receipt;
  }
  std::vector<int> lock_all(const std::vector<ModelMatch>& matches) {
    std::vector<int> receipts;
    for (const ModelMatch& match : matches) {
      receipts.push_back(pin(match));
      if (match.blocks > 0) limit_all_protected();
    }
    prune();
    return receipts;
  }
  int fork(int receipt) { return new_receipt(receipts.at(receipt)); }
  void unlock(int receipt, uint32_t components, const radix::RetentionHint& hint) {
    ++turn;
    drop(receipts.at(receipt), components, hint);
    if (receipts.at(receipt).components == 0) receipts.erase(receipt);
    prune();
  }

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

 private:
  int pin(const ModelMatch& match) {
    ++turn;
    note_reuse(match);
    const uint32_t all = (1u << num_components) - 1;
    if (match.blocks == 0) return new_receipt({-1, all, turn});
    const int end = match.path[static_cast<size_t>(match.blocks - 1)];
    cells.at(end).ends_node = true;
    return new_receipt(lock_end(end, all, true));
  }
  void limit_all_protected() {
    for (size_t c = 0; policy == radix::Policy::Slru && c <= windows.size(); ++c) limit_protected(c);
  }
  int new_receipt(ModelReceipt receipt) {
    receipts[next_receipt] = receipt;
    return next_receipt++;
  }
  static void expect(bool condition, ErrorKind kind) {
    if (!condition) fail(kind, "the model refuses");
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
  void give_state(const ModelOffer& offer, size_t which, int end, int below) {
    const auto& [blocks, id] = offer.states[which];
    Cell& cell = cells.at(path(end)[static_cast<size_t>(blocks - 1)]);
    cell.ends_node = true;
    if (cell.state != radix::kNoState) return;
    cell.state = id;
    place_state(path(end)[static_cast<size_t>(blocks - 1)], fresh(offer.hint), below);
  }

  int next_cell = 0, next_receipt = 0;
};

}  // namespace pagecore::test
