// Window blocks of full blocks: a SlotAllocator that has them takes a block of a second, smaller pool for each block.
//
// Layers with a sliding window store their keys in the window pool. The map leads from a slot of the full pool to the
// slot of the window pool with the same token:
//
//   block size 4      full block      1      2      3   |  not taken
//                     window block    0      5      2   |
//                     map  0 0 0 0  0 0 0 0  20 .. 23  8 .. 11  0 0 ... 0  -1
//                                      ^ released: a hole                   ^ one more entry, which slot -1 finds
//
// I1: a full block with references has a window block or a hole; two full blocks have different window blocks.
// I2: map[slot] is the slot with the same offset in the window block, or 0 for a hole; the last entry is -1.
// I3: references_[full] counts our references to the window block: 0 for a hole, at most those of a full block that
//     only the allocator's callers hold.
// Full blocks that another holder frees keep their window blocks until the allocator takes them again.
// Memory: 4 bytes for each slot and 8 for each block of the full pool that was ever taken.
// Threads: one writer; all but block_of() and map() require that both pools are locked.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "pagecore/index/pools/block_pool.hpp"
#include "pagecore/index/pools/zeroed_array.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

class WindowPeers {
 public:
  WindowPeers(std::shared_ptr<BlockPool> window, BlockId num_full_blocks, int64_t block_size);

  [[nodiscard]] BlockPool::Transaction& pool() { return pool_; }
  [[nodiscard]] const BlockPool::Transaction& pool() const { return pool_; }
  // The window block of a full block; the null block for a hole.
  [[nodiscard]] BlockId block_of(BlockId full) const { return blocks_[static_cast<size_t>(full)]; }
  [[nodiscard]] int32_t* map() { return map_.data(); }
  [[nodiscard]] int64_t map_size() const { return int64_t{num_full_blocks_} * block_size_ + 1; }

  // Gives each full block a window block. Precondition: the window pool has full.size() free blocks.
  void take(std::span<const BlockId> full);
  // Adds a reference to the window block of a full block, if it has one.
  void share(BlockId full);
  // Drops a reference to the window block of a full block, if it has one; returns true if that became free. Without
  // references of ours the full block has a hole.
  bool drop(BlockId full);
  // Drops references until at most `references` of ours are left.
  void limit(BlockId full, int32_t references);

  [[nodiscard]] size_t nbytes() const {
    return sizeof(*this) + blocks_.nbytes() + references_.nbytes() + map_.nbytes();
  }
  void check_invariants() const;

 private:
  void set(BlockId full, BlockId window);

  std::shared_ptr<BlockPool> owner_;
  BlockPool::Transaction pool_;
  BlockId num_full_blocks_;
  int64_t block_size_;
  ZeroedArray<BlockId> blocks_;      // by full block
  ZeroedArray<int32_t> references_;  // by full block
  ZeroedArray<int32_t> map_;         // by full slot
};

}  // namespace pagecore
