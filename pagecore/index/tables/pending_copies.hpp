// Copies of blocks that copy-on-write requires and that have not been taken yet, in the order in which they must run.
//
// A copy whose target has been freed is dropped, unless a later copy that runs reads that target.
// I1: is_target_ has the bit of a block iff the block is the target of a copy that is not dropped; there is at most one
//     such copy for a block.
// Cost: O(1) for a block that is not a target, a search of the pending copies for one that is. Memory: one bit for each
// block of the pool, committed on first use. Threads: the owner synchronises.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/native/checks.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

struct BlockCopy {
  BlockId source;
  BlockId target;
};

class PendingCopies {
 public:
  explicit PendingCopies(BlockId num_blocks) : is_target_((static_cast<size_t>(num_blocks) + 63) / 64) {}

  // Makes room for `more` copies; add() cannot fail then.
  void reserve(size_t more) {
    const size_t needed = copies_.size() + more;
    if (needed > copies_.capacity()) copies_.reserve(std::max(needed, 2 * copies_.capacity()));
  }

  void add(BlockCopy copy) {
    drop(copy.target);
    copies_.push_back({copy, false});
    word_of(copy.target) |= bit_of(copy.target);
  }

  // Drops the copy to `target`, which was freed.
  void drop(BlockId target) {
    if (!(word_of(target) & bit_of(target))) return;
    word_of(target) &= ~bit_of(target);
    for (Entry& entry : copies_) {
      if (entry.copy.target == target) entry.is_dropped = true;
    }
  }

  // Forgets the copies that need not run and returns the number left; is_live(block): the block has references.
  template <typename IsLive>
  size_t settle(IsLive is_live) {
    for (const Entry& entry : copies_) {
      if (!is_live(entry.copy.target)) drop(entry.copy.target);
    }
    size_t first = copies_.size();  // copies from here on stay
    for (size_t i = copies_.size(); i-- > 0;) {
      const Entry entry = copies_[i];
      if (!entry.is_dropped || is_read(std::span(copies_).subspan(first), entry.copy.target)) copies_[--first] = entry;
    }
    copies_.erase(copies_.begin(), copies_.begin() + static_cast<std::ptrdiff_t>(first));
    return copies_.size();
  }

  // Moves all copies that settle() left to `out`. Precondition: out.size() == size().
  void take(std::span<BlockCopy> out) {
    PC_ASSERT(out.size() == copies_.size());
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = copies_[i].copy;
      word_of(out[i].target) &= ~bit_of(out[i].target);
    }
    copies_.clear();
  }

  [[nodiscard]] size_t size() const { return copies_.size(); }
  [[nodiscard]] size_t nbytes() const { return is_target_.nbytes() + copies_.capacity() * sizeof(Entry); }

  void check_invariants() const {
    for (size_t i = 0; i < copies_.size(); ++i) {
      const BlockId target = copies_[i].copy.target;
      size_t num_live = 0;
      for (const Entry& entry : copies_) num_live += entry.copy.target == target && !entry.is_dropped;
      const bool marked = is_target_[static_cast<size_t>(target) >> 6] & bit_of(target);
      PC_ASSERT(num_live == static_cast<size_t>(marked));
    }
  }

 private:
  struct Entry {
    BlockCopy copy;
    bool is_dropped;
  };

  static uint64_t bit_of(BlockId block) { return uint64_t{1} << (static_cast<unsigned>(block) & 63); }
  uint64_t& word_of(BlockId block) { return is_target_[static_cast<size_t>(block) >> 6]; }

  static bool is_read(std::span<const Entry> entries, BlockId block) {
    return std::any_of(entries.begin(), entries.end(), [=](const Entry& entry) { return entry.copy.source == block; });
  }

  ZeroedArray<uint64_t> is_target_;
  std::vector<Entry> copies_;
};

}  // namespace pagecore
