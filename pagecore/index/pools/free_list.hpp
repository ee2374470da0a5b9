// Free list of the ids 1 .. n - 1 in LIFO, FIFO or address order.
//
// Ids that were never taken are not stored: they are fresh_ .. n - 1. The other free ids are in entries_ (LIFO: a
// stack, FIFO: a ring that starts at head_) or in a bitmap (address order). I1: every free id is fresh or stored
// exactly once; ids below 1 never are. I2: fresh ids are taken in ascending order: after the stored ids in LIFO and
// address order (as from a stack with id 1
//     on top; every stored id is below fresh_), before them in FIFO order.
// Cost: O(1) an id, O(log64 n) in address order; construction touches no memory. Threads: the owner synchronises.
#pragma once

#include <algorithm>
#include <span>

#include "pagecore/index/pools/id_bitmap.hpp"
#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/native/checks.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

enum class Order : int { Lifo = 0, Fifo = 1, Address = 2 };

class FreeList {
 public:
  FreeList(BlockId num_ids, Order order)
      : order_(order),
        num_ids_(num_ids),
        entries_(order == Order::Address ? 0 : static_cast<size_t>(num_ids)),
        lowest_(order == Order::Address ? num_ids : 0) {}

  [[nodiscard]] BlockId size() const { return num_stored_ + (num_ids_ - fresh_); }
  [[nodiscard]] size_t nbytes() const { return entries_.nbytes() + lowest_.nbytes(); }

  // The id that take() returns next in address order. Precondition: size() > 0.
  [[nodiscard]] BlockId lowest() const { return num_stored_ > 0 ? lowest_.lowest() : fresh_; }

  void push(BlockId id) {
    switch (order_) {
      case Order::Lifo: entries_[static_cast<size_t>(num_stored_)] = id; break;
      case Order::Fifo: entries_[ring(num_stored_)] = id; break;
      case Order::Address: lowest_.insert(id); break;
    }
    ++num_stored_;
  }

  // Calls work(push) once. push(id) is faster than push() over many ids because its state stays in registers.
  template <typename Work>
  void push_many(Work work) {
    BlockId stored = num_stored_;
    switch (order_) {
      case Order::Lifo: {
        BlockId* const entries = entries_.data();
        work([&](BlockId id) { entries[stored++] = id; });
        break;
      }
      case Order::Fifo: {
        BlockId* const entries = entries_.data();
        const auto num_ids = static_cast<size_t>(num_ids_);
        size_t at = ring(stored);
        work([&](BlockId id) {
          entries[at] = id;
          at = at + 1 < num_ids ? at + 1 : 0;
          ++stored;
        });
        break;
      }
      case Order::Address: stored += lowest_.insert_many(work); break;
    }
    num_stored_ = stored;
  }

  // Undoes the latest push(id).
  void take_back(BlockId id) {
    if (order_ == Order::Address) lowest_.erase(id);
    --num_stored_;
  }

  // Takes out.size() ids. Precondition: size() >= out.size().
  void take(std::span<BlockId> out) {
    switch (order_) {
      case Order::Lifo: return take_fresh(take_stack(out));
      case Order::Fifo: return take_ring(out);
      case Order::Address: return take_fresh(take_bitmap(out));
    }
  }

  // Calls visit(id) for every free id.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (BlockId i = 0; order_ != Order::Address && i < num_stored_; ++i) {
      visit(entries_[order_ == Order::Lifo ? static_cast<size_t>(i) : ring(i)]);
    }
    for (BlockId id = 0; order_ == Order::Address && id < num_ids_; ++id) {
      if (lowest_.contains(id)) visit(id);
    }
    for (BlockId id = fresh_; id < num_ids_; ++id) visit(id);
  }

  void check_invariants() const {
    PC_ASSERT(num_stored_ >= 0 && num_stored_ < fresh_ && fresh_ >= 1 && fresh_ <= num_ids_);
    if (order_ == Order::Address) lowest_.check_invariants(num_stored_);
  }

 private:
  [[nodiscard]] size_t ring(BlockId offset) const {
    const int64_t at = int64_t{head_} + offset;
    return static_cast<size_t>(at < num_ids_ ? at : at - num_ids_);
  }

  // Fill the front of `out` and return the rest.
  std::span<BlockId> take_stack(std::span<BlockId> out) {
    const size_t count = std::min(out.size(), static_cast<size_t>(num_stored_));
    const BlockId* top = entries_.data() + num_stored_;
    for (size_t i = 0; i < count; ++i) out[i] = *--top;
    num_stored_ -= static_cast<BlockId>(count);
    return out.subspan(count);
  }

  std::span<BlockId> take_bitmap(std::span<BlockId> out) {
    const size_t count = std::min(out.size(), static_cast<size_t>(num_stored_));
    lowest_.take_lowest(out.first(count));
    num_stored_ -= static_cast<BlockId>(count);
    return out.subspan(count);
  }

  void take_fresh(std::span<BlockId> out) {
    for (BlockId& id : out) id = fresh_++;
  }

  void take_ring(std::span<BlockId> out) {
    const size_t fresh = std::min(out.size(), static_cast<size_t>(num_ids_ - fresh_));
    take_fresh(out.first(fresh));
    for (BlockId& id : out.subspan(fresh)) {
      id = entries_[static_cast<size_t>(head_)];
      head_ = head_ + 1 < num_ids_ ? head_ + 1 : 0;
    }
    num_stored_ -= static_cast<BlockId>(out.size() - fresh);
  }

  Order order_;
  BlockId num_ids_;
  BlockId fresh_ = 1;       // the lowest id that was never taken
  BlockId num_stored_ = 0;  // ids in entries_ or in the bitmap
  BlockId head_ = 0;        // FIFO: index of the oldest entry
  ZeroedArray<BlockId> entries_;
  IdBitmap lowest_;
};

}  // namespace pagecore
