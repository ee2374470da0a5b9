// Indexed 4-ary min-heap of nodes, worst first: the eviction queue of one component.
//
// I1: no entry is smaller than its parent. I2: position_[n] is the index of node n in entries_, or kAbsent.
// Entries hold copies of the keys, so that sifting touches only the heap and the positions.
// Cost: O(log n) for put and erase, O(1) for top. Memory: 36 bytes a node, all taken by reserve(); nothing else fails.
// Threads: one writer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "pagecore/index/radix/nodes/key.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore::radix {

// The smallest key is evicted first; the last criterion prefers the node nearer the root.
struct HeapKey {
  double primary = 0;
  uint64_t turn = 0;
  int32_t depth = 0;

  [[nodiscard]] bool operator<(const HeapKey& other) const {
    return std::tie(primary, turn, depth) < std::tie(other.primary, other.turn, other.depth);
  }
};

class NodeHeap {
 public:
  void reserve(size_t nodes) {
    entries_.reserve(nodes);
    if (nodes > position_.size()) position_.resize(nodes, kAbsent);
  }

  // Reduces the capacity to `nodes`; every node in the heap has a lower id.
  void shrink(size_t nodes) {
    std::vector<Entry> entries;
    entries.reserve(nodes);
    entries.assign(entries_.begin(), entries_.end());
    std::vector<int32_t> position(nodes, kAbsent);
    std::copy_n(position_.begin(), std::min(nodes, position_.size()), position.begin());
    entries_.swap(entries);
    position_.swap(position);
  }

  [[nodiscard]] bool empty() const { return entries_.empty(); }
  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  [[nodiscard]] NodeId top() const { return entries_.front().node; }
  [[nodiscard]] const HeapKey& top_key() const { return entries_.front().key; }
  [[nodiscard]] bool holds(NodeId node) const { return position(node) != kAbsent; }
  [[nodiscard]] const HeapKey& key(NodeId node) const { return entries_[static_cast<size_t>(position(node))].key; }

  // Adds the node, or moves it if it is in the heap. Does not allocate after reserve().
  void put(NodeId node, const HeapKey& key) {
    if (!holds(node)) {
      entries_.push_back(Entry{key, node});
      rise(entries_.size() - 1, Entry{key, node});
      return;
    }
    settle(static_cast<size_t>(position(node)), Entry{key, node});
  }

  void erase(NodeId node) {
    if (!holds(node)) return;
    const size_t hole = static_cast<size_t>(position(node));
    position(node) = kAbsent;
    const Entry last = entries_.back();
    entries_.pop_back();
    if (hole < entries_.size()) settle(hole, last);
  }

  [[nodiscard]] size_t nbytes() const {
    return entries_.capacity() * sizeof(Entry) + position_.capacity() * sizeof(int32_t);
  }

  void check_invariants() const {
    size_t present = 0;
    for (const int32_t at : position_) present += at != kAbsent;
    PC_ASSERT(present == entries_.size());
    for (size_t i = 0; i < entries_.size(); ++i) {
      PC_ASSERT(position(entries_[i].node) == static_cast<int32_t>(i));
      PC_ASSERT(i == 0 || !(entries_[i].key < entries_[parent(i)].key));
    }
  }

 private:
  static constexpr int32_t kAbsent = -1;
  static constexpr size_t kArity = 4;
  struct Entry {
    HeapKey key;
    NodeId node;
  };

  [[nodiscard]] static size_t parent(size_t i) { return (i - 1) / kArity; }
  [[nodiscard]] int32_t& position(NodeId node) { return position_[static_cast<size_t>(node)]; }
  [[nodiscard]] int32_t position(NodeId node) const { return position_[static_cast<size_t>(node)]; }

  void set(size_t i, const Entry& entry) {
    entries_[i] = entry;
    position(entry.node) = static_cast<int32_t>(i);
  }

  void settle(size_t i, const Entry& entry) {
    if (i > 0 && entry.key < entries_[parent(i)].key) {
      rise(i, entry);
    } else {
      sink(i, entry);
    }
  }

  void rise(size_t i, const Entry& entry) {
    for (; i > 0 && entry.key < entries_[parent(i)].key; i = parent(i)) set(i, entries_[parent(i)]);
    set(i, entry);
  }

  void sink(size_t i, const Entry& entry) {
    while (true) {
      const size_t first = i * kArity + 1;
      if (first >= entries_.size()) break;
      size_t least = first;
      for (size_t child = first + 1; child < std::min(first + kArity, entries_.size()); ++child) {
        if (entries_[child].key < entries_[least].key) least = child;
      }
      if (!(entries_[least].key < entry.key)) break;
      set(i, entries_[least]);
      i = least;
    }
    set(i, entry);
  }

  std::vector<Entry> entries_;
  std::vector<int32_t> position_;
};

}  // namespace pagecore::radix
