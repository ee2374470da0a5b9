// Flat hash map (parent, first block) -> child with linear probing; an entry is 32 bits of hash and the child.
//
// I1: capacity is a power of two, at most 3/4 of it is used, and an empty entry holds kNoNode.
// I2: every entry between a child's home (the top bits of its hash) and its position is used.
// Equal hashes prove nothing: find() asks the caller about every candidate.
// Cost: O(1) expected; erase() moves later entries back instead of leaving tombstones. Memory: 8 bytes an entry; only
// reserve() grows the map, and shrink() shrinks it when less than 1/8 is used. Threads: one writer.
#pragma once

#include <bit>
#include <cstdint>
#include <new>
#include <vector>

#include "pagecore/index/radix/nodes/key.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore::radix {

class ChildMap {
 public:
  ChildMap() : entries_(kMinCapacity) {}

  template <typename IsMatch>
  [[nodiscard]] NodeId find(uint32_t hash, IsMatch&& is_match) const {
    for (size_t i = home(hash);; i = next(i)) {
      const Entry& entry = entries_[i];
      if (entry.child == kNoNode) return kNoNode;
      if (entry.hash == hash && is_match(entry.child)) return entry.child;
    }
  }

  // Makes room for `count` more entries; add() cannot fail then.
  void reserve(int64_t count) {
    const size_t wanted = static_cast<size_t>(size_ + count);
    if (wanted * 4 > entries_.size() * 3) rebuild(std::bit_ceil(wanted * 3 / 2 + 1));
  }

  void add(uint32_t hash, NodeId child) noexcept {
    store(entries_, hash, child);
    ++size_;
  }

  // Precondition of replace() and erase(): the map has `child` under `hash`.
  void replace(uint32_t hash, NodeId child, NodeId with) { entries_[find_position(hash, child)].child = with; }

  void erase(uint32_t hash, NodeId child) {
    size_t hole = find_position(hash, child);
    for (size_t i = next(hole); entries_[i].child != kNoNode; i = next(i)) {
      // An entry may move back to the hole unless its home lies after the hole.
      if (((i - home(entries_[i].hash)) & mask()) >= ((i - hole) & mask())) {
        entries_[hole] = entries_[i];
        hole = i;
      }
    }
    entries_[hole] = Entry{};
    --size_;
  }

  // Returns memory that a once larger tree no longer needs; keeps it if the smaller table cannot be allocated.
  void shrink() noexcept {
    if (entries_.size() <= kMinCapacity || static_cast<size_t>(size_) * 8 >= entries_.size()) return;
    try {
      rebuild(std::bit_ceil(static_cast<size_t>(size_) * 2 + 1));
    } catch (const std::bad_alloc&) {
    }
  }

  [[nodiscard]] int64_t size() const { return size_; }
  [[nodiscard]] size_t nbytes() const { return entries_.capacity() * sizeof(Entry); }

  void check_invariants() const {
    int64_t used = 0;
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (entries_[i].child == kNoNode) continue;
      ++used;
      for (size_t j = home(entries_[i].hash); j != i; j = next(j)) PC_ASSERT(entries_[j].child != kNoNode);
    }
    PC_ASSERT(used == size_);
    PC_ASSERT(std::has_single_bit(entries_.size()) && static_cast<size_t>(size_) * 4 <= entries_.size() * 3);
  }

 private:
  static constexpr size_t kMinCapacity = 16;
  struct Entry {
    uint32_t hash = 0;
    NodeId child = kNoNode;
  };

  [[nodiscard]] size_t mask() const { return entries_.size() - 1; }
  [[nodiscard]] size_t next(size_t i) const { return (i + 1) & mask(); }
  [[nodiscard]] size_t home(uint32_t hash) const { return home(hash, entries_.size()); }
  [[nodiscard]] static size_t home(uint32_t hash, size_t capacity) {
    return static_cast<size_t>((static_cast<uint64_t>(hash) * capacity) >> 32);
  }

  [[nodiscard]] size_t find_position(uint32_t hash, NodeId child) const {
    size_t i = home(hash);
    while (entries_[i].child != child) {
      PC_ASSERT(entries_[i].child != kNoNode);
      i = next(i);
    }
    return i;
  }

  static void store(std::vector<Entry>& entries, uint32_t hash, NodeId child) noexcept {
    size_t i = home(hash, entries.size());
    while (entries[i].child != kNoNode) i = (i + 1) & (entries.size() - 1);
    entries[i] = Entry{hash, child};
  }

  void rebuild(size_t capacity) {
    std::vector<Entry> entries(std::max(kMinCapacity, capacity));
    for (const Entry& entry : entries_) {
      if (entry.child != kNoNode) store(entries, entry.hash, entry.child);
    }
    entries_.swap(entries);
  }

  std::vector<Entry> entries_;
  int64_t size_ = 0;
};

}  // namespace pagecore::radix
