// Reference counts and free list of physical blocks.
//
// I1: ref_count_[b] > 0: b has that many references; == 0: b is free, and in free_ exactly once; == kRetired: b is in
//     exactly one chain.
// I2: block 0 (the null block) has count 0, and is neither in free_ nor in a chain.
// I3: num_free + num_used + num_retired == num_blocks - 1.
// I4: a chain of retired_ is not empty; it runs from head to tail through next_, in the order of retirement.
// States: free -> held (allocate) -> shared (share) -> held (free) -> free (free)
//                                                      held -> retired (retire) -> free (reclaim).
// All or nothing: if one block of a list is invalid, including one whose last reference an earlier entry dropped, the
// earlier entries are undone exactly.
// Cost: O(n) for n blocks (allocate and free O(n log64 N) in address order). After construction only retire()
// allocates, one small node for each step. Memory: 12 bytes a block, committed on first use.
// Threads: every call takes mutex_; a Transaction keeps it over several calls. In the child of fork(), no pool is
// in the middle of a call.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "pagecore/index/pools/fork_safe_mutex.hpp"
#include "pagecore/index/pools/free_list.hpp"
#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

class BlockPool {
 public:
  class Transaction;

  // `num_blocks` counts the null block.
  BlockPool(int64_t num_blocks, Order order);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Takes out.size() blocks; returns false, with nothing taken, if fewer are free.
  [[nodiscard]] bool try_allocate(std::span<BlockId> out);
  // Adds one reference to each block.
  void share(std::span<const BlockId> blocks);
  // Drops one reference to each block; returns the number of blocks that became free.
  BlockId free(std::span<const BlockId> blocks);
  // Drops one reference to each block; blocks without references wait for reclaim(step). Returns their number.
  BlockId retire(std::span<const BlockId> blocks, int64_t step);
  // Frees the blocks that were retired at `step` or before, oldest step first; returns their number.
  BlockId reclaim(int64_t step);

  // References to a block; 0 for free and retired blocks and the null block.
  [[nodiscard]] int32_t ref_count(int64_t block) const;
  // References to every block; out.size() == num_blocks().
  void copy_ref_counts(std::span<int32_t> out) const;

  // The number of blocks of a list before the first one with several references; null blocks have none. Ids are not
  // checked.
  [[nodiscard]] size_t num_unshared(std::span<const BlockId> blocks) const;
  // Appends the indices of the blocks with exactly one reference, in ascending order. Ids are not checked.
  void find_held_once(std::span<const BlockId> blocks, std::vector<int32_t>& out) const;

  [[nodiscard]] BlockId num_blocks() const { return num_blocks_; }
  [[nodiscard]] BlockId num_free() const;
  [[nodiscard]] BlockId num_used() const;
  [[nodiscard]] BlockId num_retired() const;
  [[nodiscard]] size_t nbytes() const;
  void check_invariants() const;

 private:
  static constexpr int32_t kRetired = -1;
  struct Chain {
    BlockId head = kNullBlock;
    BlockId tail = kNullBlock;
  };

  // False for the null block, whose count stays 0.
  [[nodiscard]] bool is_held(BlockId block) const {
    return static_cast<uint32_t>(block) < static_cast<uint32_t>(num_blocks_) &&
           ref_count_[static_cast<size_t>(block)] > 0;
  }
  [[noreturn, gnu::cold]] void refuse(BlockId block, const char* verb, const char* free, const char* remedy) const;
  void undo_shares(std::span<const BlockId> blocks);
  void undo_drops(std::span<const BlockId> blocks);
  void undo_retirements(std::span<const BlockId> blocks, Chain& chain, Chain before);
  void append(Chain& chain, BlockId block);
  void check_chains() const;

  const BlockId num_blocks_;
  mutable ForkSafeMutex mutex_;
  BlockId num_retired_ = 0;
  FreeList free_;
  ZeroedArray<int32_t> ref_count_;
  ZeroedArray<BlockId> next_;  // of a retired block, in its chain
  std::map<int64_t, Chain> retired_;
};

// Many small operations under one lock. A Transaction is lockable: make it once, and hold it with std::lock_guard over
// each batch; other members may be called only then. Nothing is checked here: the caller knows its blocks. To hold
// several pools, lock them in the order of their addresses.
class BlockPool::Transaction {
 public:
  explicit Transaction(BlockPool& pool) : pool_(&pool) {}

  void lock() { pool_->mutex_.lock(); }
  void unlock() { pool_->mutex_.unlock(); }

  [[nodiscard]] BlockId num_blocks() const { return pool_->num_blocks_; }
  [[nodiscard]] BlockId num_free() const { return pool_->free_.size(); }
  [[nodiscard]] int32_t ref_count(BlockId block) const { return pool_->ref_count_[static_cast<size_t>(block)]; }

  // Precondition: num_free() > 0.
  [[nodiscard]] BlockId take() {
    BlockId block = kNullBlock;
    take({&block, 1});
    return block;
  }
  // Precondition: num_free() >= out.size().
  void take(std::span<BlockId> out) {
    pool_->free_.take(out);
    for (const BlockId block : out) pool_->ref_count_[static_cast<size_t>(block)] = 1;
  }
  // Precondition: ref_count(block) > 0.
  void share(BlockId block) { ++pool_->ref_count_[static_cast<size_t>(block)]; }
  // Precondition: ref_count(block) > 0. Returns true if the block became free.
  bool drop(BlockId block) {
    if (--pool_->ref_count_[static_cast<size_t>(block)] > 0) return false;
    pool_->free_.push(block);
    return true;
  }

 private:
  BlockPool* pool_;
};

}  // namespace pagecore
