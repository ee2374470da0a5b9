// Storage of nodes: tokens, block ids and marks. A node is a slice of a storage; a split makes two slices and copies
// nothing.
//
//   data     [ tokens of every block | ids of lane 0 | ids of lane 1 | ... ]
//   blocks   [ slice 0 | free | slice 1 | slice 2 | room to grow )            `capacity` blocks, `live` in slices
//
// A lane has one id for each block: first the lanes of the full component, then one lane for each window, in which the
// null block is a hole. In a tree with a journal two more lanes follow: the halves of each block's content hash.
// I1: the slices of a storage do not overlap and are linked in ascending order; live is the sum of their sizes.
//     They lie on one path, top first, so that a leaf is the last slice and may grow into the room after it.
// I2: 2 * capacity <= 3 * live, unless memory ran out while compacting. A storage without slices is freed.
// Memory: (block_size + lanes) * 4 bytes a block. Threads: one writer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "pagecore/index/radix/nodes/key.hpp"

namespace pagecore::radix {

using StorageId = int32_t;

inline constexpr int32_t kHashLanes = 2;

struct NodeStorage {
  std::unique_ptr<int32_t[]> data;
  std::vector<Mark> marks;  // sorted by block, counted from the start of the storage
  int32_t capacity = 0;
  int32_t live = 0;
  NodeId first = kNoNode;  // head of the linked slices
};

struct Slice {
  int32_t start;
  int32_t size;
};

class StoragePool {
 public:
  StoragePool(int64_t block_size, int32_t lanes) : block_size_(block_size), lanes_(lanes) {}

  // Makes room for `count` more storages; add() cannot fail then.
  void reserve(size_t count = 1) {
    if (free_.size() >= count) return;
    const size_t wanted = storages_.size() + count - free_.size();
    if (wanted > storages_.capacity()) storages_.reserve(std::max(wanted, storages_.size() * 2 + 16));
    free_.reserve(storages_.capacity());
  }
  [[nodiscard]] StorageId add(NodeStorage&& storage) noexcept {
    held_blocks_ += storage.capacity;
    held_marks_ += storage.marks.capacity();
    if (free_.empty()) {
      storages_.push_back(std::move(storage));
      return static_cast<StorageId>(storages_.size() - 1);
    }
    const StorageId id = free_.back();
    free_.pop_back();
    storages_[static_cast<size_t>(id)] = std::move(storage);
    return id;
  }
  void remove(StorageId id) noexcept {
    NodeStorage& storage = storages_[static_cast<size_t>(id)];
    held_blocks_ -= storage.capacity;
    held_marks_ -= storage.marks.capacity();
    storage = NodeStorage{};
    free_.push_back(id);
  }

  // Returns a storage for blocks [first, first + count) of the query, with their tokens and marks, not yet added.
  // `spare`, if given, was made for the same query from `first` or an earlier block on; its memory is used if it fits
  // exactly or if none can be allocated.
  [[nodiscard]] NodeStorage make(const Query& query, int64_t first, int64_t count, NodeStorage* spare = nullptr) const {
    if (spare != nullptr && spare->capacity == count) return std::move(*spare);
    NodeStorage storage;
    try {
      storage.data = std::make_unique_for_overwrite<int32_t[]>(words(count));
      storage.marks.reserve(
          static_cast<size_t>(first_mark_from(query.marks, first + count) - first_mark_from(query.marks, first)));
    } catch (const std::bad_alloc&) {
      if (spare == nullptr) throw;
      storage = std::move(*spare);
    }
    storage.capacity = storage.live = static_cast<int32_t>(count);
    std::copy_n(query.tokens.data() + first * block_size_, count * block_size_, storage.data.get());
    const Mark* const begin = first_mark_from(query.marks, first);
    storage.marks.assign(begin, first_mark_from(query.marks, first + count));
    for (Mark& mark : storage.marks) mark.block -= static_cast<int32_t>(first);
    return storage;
  }

  [[nodiscard]] NodeStorage& operator[](StorageId id) { return storages_[static_cast<size_t>(id)]; }
  [[nodiscard]] const NodeStorage& operator[](StorageId id) const { return storages_[static_cast<size_t>(id)]; }
  [[nodiscard]] const int32_t* tokens(StorageId id, int64_t block) const {
    return (*this)[id].data.get() + block * block_size_;
  }
  [[nodiscard]] int32_t* lane(NodeStorage& storage, int32_t lane) const {
    return storage.data.get() + storage.capacity * (block_size_ + lane);
  }
  [[nodiscard]] const int32_t* lane(const NodeStorage& storage, int32_t lane) const {
    return storage.data.get() + storage.capacity * (block_size_ + lane);
  }
  [[nodiscard]] static bool is_sparse(const NodeStorage& storage) {
    return int64_t{storage.live} * 3 < int64_t{storage.capacity} * 2;
  }

  // Moves the slices, which are in order, to the front of a new array of `capacity` blocks and updates their starts.
  void resize(StorageId id, std::span<Slice> slices, int32_t capacity) {
    NodeStorage& old = (*this)[id];
    NodeStorage storage;
    storage.capacity = capacity;
    storage.live = old.live;
    storage.first = old.first;
    storage.data = std::make_unique_for_overwrite<int32_t[]>(words(capacity));
    int32_t size = 0;
    for (Slice& slice : slices) size += move(old, storage, slice, size);
    held_blocks_ += storage.capacity - old.capacity;
    held_marks_ += storage.marks.capacity() - old.marks.capacity();
    old = std::move(storage);
  }
  // Resizes to `live` blocks; returns false with nothing changed if no memory is left.
  [[nodiscard]] bool compact(StorageId id, std::span<Slice> slices) noexcept {
    try {
      resize(id, slices, (*this)[id].live);
    } catch (const std::bad_alloc&) {
      was_memory_short_ = true;
      return false;
    }
    return true;
  }

  // Gives every storage `lanes` lanes, of which new ones are not initialised; all or nothing.
  void widen(int32_t lanes) {
    if (lanes <= lanes_) return;
    std::vector<std::unique_ptr<int32_t[]>> wider(storages_.size());
    for (size_t i = 0; i < storages_.size(); ++i) {
      if (storages_[i].data == nullptr) continue;
      const auto blocks = static_cast<size_t>(storages_[i].capacity);
      wider[i] = std::make_unique_for_overwrite<int32_t[]>(blocks * static_cast<size_t>(block_size_ + lanes));
    }
    for (size_t i = 0; i < storages_.size(); ++i) {
      if (wider[i] == nullptr) continue;
      std::copy_n(storages_[i].data.get(), words(storages_[i].capacity), wider[i].get());
      storages_[i].data = std::move(wider[i]);
    }
    lanes_ = lanes;
  }

  // Renumbers the storages from 0 and calls `renumber(first slice, new id)` for each.
  template <typename Renumber>
  void pack(Renumber&& renumber) {
    std::vector<NodeStorage> storages;
    storages.reserve(size() + size() / 2 + 16);
    std::vector<StorageId> free;
    free.reserve(storages.capacity());
    for (NodeStorage& storage : storages_) {
      if (storage.live == 0) continue;
      renumber(storage.first, static_cast<StorageId>(storages.size()));
      storages.push_back(std::move(storage));
    }
    storages_.swap(storages);
    free_.swap(free);
  }

  // True if a compaction has ever failed, so that I2 may not hold.
  [[nodiscard]] bool was_memory_short() const { return was_memory_short_; }
  [[nodiscard]] int64_t held_blocks() const { return held_blocks_; }
  [[nodiscard]] size_t size() const { return storages_.size() - free_.size(); }
  [[nodiscard]] size_t nbytes() const {
    return words(held_blocks_) * sizeof(int32_t) + held_marks_ * sizeof(Mark) +
           storages_.capacity() * sizeof(NodeStorage) + free_.capacity() * sizeof(StorageId);
  }

 private:
  [[nodiscard]] size_t words(int64_t blocks) const { return static_cast<size_t>(blocks * (block_size_ + lanes_)); }

  int32_t move(const NodeStorage& from, NodeStorage& to, Slice& slice, int32_t start) const {
    std::copy_n(from.data.get() + slice.start * block_size_, slice.size * block_size_,
                to.data.get() + start * block_size_);
    for (int32_t i = 0; i < lanes_; ++i) std::copy_n(lane(from, i) + slice.start, slice.size, lane(to, i) + start);
    const Mark* const end = first_mark_from(from.marks, int64_t{slice.start} + slice.size);
    for (const Mark* mark = first_mark_from(from.marks, slice.start); mark != end; ++mark) {
      to.marks.push_back(*mark);
      to.marks.back().block += start - slice.start;
    }
    slice.start = start;
    return slice.size;
  }

  int64_t block_size_;
  int32_t lanes_;
  int64_t held_blocks_ = 0;
  size_t held_marks_ = 0;
  bool was_memory_short_ = false;
  std::vector<NodeStorage> storages_;
  std::vector<StorageId> free_;
};

}  // namespace pagecore::radix
