// Allocator of token slots, for engines that keep their own tables: blocks are taken, continued and freed by slot.
//
// The slots of a sequence fill its blocks in order, so that its length and its last slot determine where it continues:
//
//   block size 4, length 6 -> 13, last slot 5     tokens ... 4 5 | 6 7 | 8 9 10 11 | 12
//                                                 block       1     1  |     3     |  5
//   Growth{next 6, block 1, head 2, rest 5}                     ^ head   ^ rest: new blocks, the last one partly used
//
// The allocator keeps no record of sequences: a caller that passes the same last slot twice gets the slots after it
// twice.
// I1: claims_[b] == number of times that claimed_ lists block b.
// I2: if no group is open, claimed_ is empty.
// States: plan_*() -> try_commit(), which executes the plan once. plan_*() checks all arguments and reads each once, so
// that the slots may be written over them. A block in claimed_ still has its reference in the pool, but is about to be
// freed: it can neither be freed again, beyond its other references, nor continued.
// With a window pool, each block has a window block (WindowPeers), and blocks of both pools are taken or none.
// All or nothing: each call checks the whole batch before a pool changes.
// Cost: O(rows + slots). Scratch grows to the largest call. Memory: 4 bytes for each block that was ever freed.
// Threads: one writer; the pools are locked, in the order of their addresses, while blocks are taken or dropped, not
// while slots are read or written.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pagecore/index/divider.hpp"
#include "pagecore/index/pools/block_pool.hpp"
#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/index/slots.hpp"
#include "pagecore/index/slots/window_peers.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

class SlotAllocator {
 public:
  using LengthSpan = std::span<const TokenCount>;
  using SlotSpan = std::span<const SlotId>;

  // `window`, if given, is another pool than `pool`.
  SlotAllocator(std::shared_ptr<BlockPool> pool, int64_t block_size, std::shared_ptr<BlockPool> window = nullptr);
  // Frees the blocks of an open group.
  ~SlotAllocator();
  SlotAllocator(const SlotAllocator&) = delete;
  SlotAllocator& operator=(const SlotAllocator&) = delete;

  // Plan the next try_commit(); return the number of slots that it will write.
  int64_t plan_allocate(int64_t num_tokens);
  int64_t plan_extend(LengthSpan prefix_lens, LengthSpan seq_lens, SlotSpan last_slots);
  int64_t plan_decode(LengthSpan seq_lens, SlotSpan last_slots);
  // Returns true if the pool has the blocks of the plan now; throws if the plan continues a free block.
  [[nodiscard]] bool has_room();
  // Writes the slots of the plan, sequence after sequence, and forgets the plan. Returns false, with nothing changed,
  // if blocks are short.
  [[nodiscard]] bool try_commit(const SlotsOut& out);
  // Throws OutOfBlocks with the figures of the last has_room() or try_commit().
  [[noreturn]] void fail_out_of_blocks() const;

  // Drops one reference to the block of every slot that starts a block; every other slot must follow the slot before
  // it. Each slot is read once, because another thread may write to the list. Returns the number of blocks that became
  // free: 0 while a group is open.
  BlockId free(SlotSpan slots);
  // Drops one reference to the window block of each listed block that has one; the list is that of free(). Returns the
  // number of window blocks that became free. Precondition: there is a window pool.
  BlockId release_window(SlotSpan slots);
  // Adds one reference to each listed block and to its window block; the list is that of free().
  void share(SlotSpan slots);
  // Within a group, free() only checks and collects. Groups nest; the outermost end_group() frees, and returns the
  // number of blocks that became free.
  void begin_group() { ++depth_; }
  BlockId end_group();

  [[nodiscard]] int64_t block_size() const { return block_size_.divisor(); }
  [[nodiscard]] int64_t num_slots() const { return num_blocks_ * block_size(); }
  // Tokens that the free blocks can hold, of the scarcer pool.
  [[nodiscard]] int64_t num_available() const;
  // Window slot of each slot, and -1 after the last. Precondition: there is a window pool.
  [[nodiscard]] int32_t* window_map() { return peers_->map(); }
  [[nodiscard]] int64_t window_map_size() const { return peers_->map_size(); }
  [[nodiscard]] size_t nbytes() const;
  void check_invariants() const;

 private:
  // Slots of one sequence: `head` slots from `next` on, in `block`, then `rest` slots in new blocks.
  struct Growth {
    SlotId next;
    int64_t rest;
    BlockId block;
    TokenCount head;
  };

  template <typename LengthsOf>
  int64_t plan(LengthsOf lengths_of, size_t num_sequences, SlotSpan last_slots);
  [[nodiscard]] Growth growth(size_t sequence, TokenCount prefix, TokenCount length, SlotId last) const;
  void forget_plan();
  [[nodiscard]] bool is_served() const;
  void check_held(const Growth& growth) const;
  template <typename Slot>
  void write_slots(Slot* out) const;

  void append_blocks(SlotSpan slots, std::vector<BlockId>& blocks) const;
  // Lists the blocks of `slots` in `listed_`; the pools are locked by the caller, who then changes them.
  void check_listed(const char* verb) const;
  [[nodiscard]] BlockId block_started_by(SlotId slot) const;
  void claim_from(size_t first);
  [[noreturn, gnu::cold]] void refuse(BlockId block) const;
  // Drops a reference to every claimed block that has one; sets `lost` to a block without. The pool is locked.
  BlockId give_back(BlockId& lost);

  // Lockable: both pools, or the only one.
  class Pools {
   public:
    Pools(BlockPool& pool, BlockPool* window);
    void lock();
    void unlock();

   private:
    BlockPool::Transaction first_;
    std::optional<BlockPool::Transaction> second_;
  };

  std::shared_ptr<BlockPool> owner_;
  mutable BlockPool::Transaction pool_;
  std::unique_ptr<WindowPeers> peers_;  // null without a window pool
  mutable Pools pools_;
  int64_t num_blocks_;
  Divider block_size_;

  // The plan.
  std::vector<Growth> growths_;
  int64_t num_planned_slots_ = 0;
  int64_t num_planned_blocks_ = 0;
  mutable int64_t num_free_seen_ = 0;  // by the last is_served()
  mutable int64_t num_free_window_seen_ = 0;
  std::vector<BlockId> taken_;

  ZeroedArray<int32_t> claims_;
  std::vector<BlockId> claimed_;
  std::vector<BlockId> listed_;  // of the current release_window() or share()
  int64_t depth_ = 0;            // open groups
};

}  // namespace pagecore
