// Slots for those who keep their own tables of tokens: blocks are taken, continued and given back by their slots.
//
// A sequence's slots run through its blocks in order, so its length and its last slot say all that is needed:
//
//   block size 4, length 6 -> 13, last slot 5     tokens ... 4 5 | 6 7 | 8 9 10 11 | 12
//                                                 block       1     1  |     3     |  5
//   Growth{next 6, block 1, head 2, rest 5}                     ^ head   ^ rest: new blocks, the last one partly used
//
// Nothing is remembered of sequences: who names a last slot twice gets the slots behind it twice.
// I1: claims_[b] == how often claimed_ names block b.
// I2: no group is open => claimed_ is empty.
// States: plan_* -> try_commit, which carries the plan out once. plan_* checks all arguments and reads each once, so
// that the slots may be written over them. A block in claimed_ is still held in the pool, but not by us any more: it
// can neither be freed again, beyond its other holders, nor continued.
// All or nothing: each call checks everything before the pool changes, over the whole batch.
// Cost: O(rows + slots). The scratch grows to the largest call and is kept. Memory: 4 bytes a block that was ever
// freed. Threads: one writer; the pool is locked while blocks are taken or dropped, not while slots are read or
// written.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pagecore/index/block_pool.hpp"
#include "pagecore/index/divider.hpp"
#include "pagecore/index/slots.hpp"
#include "pagecore/index/zeroed_array.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

class SlotAllocator {
 public:
  using Lengths = std::span<const TokenCount>;
  using Slots = std::span<const SlotId>;

  SlotAllocator(std::shared_ptr<BlockPool> pool, int64_t block_size);
  // Gives back what an open group still claims.
  ~SlotAllocator();
  SlotAllocator(const SlotAllocator&) = delete;
  SlotAllocator& operator=(const SlotAllocator&) = delete;

  // Each returns how many slots the next try_commit will write.
  int64_t plan_allocate(int64_t num_tokens);
  int64_t plan_extend(Lengths prefix_lens, Lengths seq_lens, Slots last_slots);
  int64_t plan_decode(Lengths seq_lens, Slots last_slots);
  // Whether the pool could serve the plan now; throws where a block that it continues is not held.
  [[nodiscard]] bool has_room();
  // Writes the slots of the plan, sequence after sequence, and forgets it. Returns false, with nothing changed, when
  // blocks are short.
  [[nodiscard]] bool try_commit(const SlotsOut& out);
  // Throws OutOfBlocks with the figures of the has_room or try_commit that came last.
  [[noreturn]] void fail_out_of_blocks() const;

  // One reference less to the block of every slot that starts one; the others must continue the slot before them. Each
  // slot is read once: another thread may write to the list.
  // Returns how many blocks became free: none while a group is open.
  BlockId free(Slots slots);
  // Between them, frees are checked and kept. Groups nest; the outermost end gives back, and returns how many blocks
  // became free.
  void begin_group() { ++depth_; }
  BlockId end_group();

  [[nodiscard]] int64_t block_size() const { return block_size_.divisor(); }
  [[nodiscard]] int64_t num_slots() const { return num_blocks_ * block_size(); }
  // Tokens that free blocks have room for.
  [[nodiscard]] int64_t num_available() const;
  [[nodiscard]] size_t nbytes() const;
  void check_invariants() const;

 private:
  // What one sequence gets: `head` slots from `next` on, in `block`, and `rest` in new blocks.
  struct Growth {
    SlotId next;
    int64_t rest;
    BlockId block;
    TokenCount head;
  };

  template <typename LengthsOf>
  int64_t plan(LengthsOf lengths_of, size_t num_sequences, Slots last_slots);
  [[nodiscard]] Growth growth(size_t sequence, TokenCount prefix, TokenCount length, SlotId last) const;
  void forget_plan();
  [[nodiscard]] bool is_served() const;
  void check_held(const Growth& growth) const;
  template <typename Slot>
  void write_slots(Slot* out) const;

  void append_blocks(Slots slots);
  [[nodiscard]] BlockId block_started_by(SlotId slot) const;
  void claim_from(size_t first);
  [[noreturn, gnu::cold]] void refuse(BlockId block) const;
  // Drops a reference of every claimed block that is still held; the pool is locked.
  BlockId give_back(BlockId& lost);

  std::shared_ptr<BlockPool> owner_;
  mutable BlockPool::Transaction pool_;
  int64_t num_blocks_;
  Divider block_size_;

  // The plan.
  std::vector<Growth> growths_;
  int64_t num_planned_slots_ = 0;
  int64_t num_planned_blocks_ = 0;
  mutable int64_t num_free_seen_ = 0;  // by the latest is_served()
  std::vector<BlockId> taken_;

  ZeroedArray<int32_t> claims_;
  std::vector<BlockId> claimed_;
  int64_t depth_ = 0;  // open groups
};

}  // namespace pagecore
