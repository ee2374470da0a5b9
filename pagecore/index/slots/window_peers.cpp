#include "pagecore/index/slots/window_peers.hpp"

#include <algorithm>
#include <vector>

#include "pagecore/index/slots.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore {
namespace {

size_t checked_map_size(const BlockPool& window, BlockId num_full_blocks, int64_t block_size) {
  PC_EXPECTS(window.num_blocks() * block_size <= kMaxNarrowSlots, ShapeError, "the window pool has ",
             window.num_blocks() * block_size, " slots; its map is int32 and names up to ", kMaxNarrowSlots,
             ", use a smaller pool");
  return static_cast<size_t>(num_full_blocks * block_size + 1);
}

}  // namespace

WindowPeers::WindowPeers(std::shared_ptr<BlockPool> window, BlockId num_full_blocks, int64_t block_size)
    : owner_(std::move(window)),
      pool_(*owner_),
      num_full_blocks_(num_full_blocks),
      block_size_(block_size),
      blocks_(static_cast<size_t>(num_full_blocks)),
      references_(static_cast<size_t>(num_full_blocks)),
      map_(checked_map_size(*owner_, num_full_blocks, block_size)) {
  map_[static_cast<size_t>(map_size() - 1)] = -1;
}

void WindowPeers::set(BlockId full, BlockId window) {
  blocks_[static_cast<size_t>(full)] = window;
  int32_t* const entries = map_.data() + full * block_size_;
  if (window == kNullBlock) {
    std::fill_n(entries, block_size_, 0);
  } else {
    write_run(entries, window * block_size_, block_size_);
  }
}

void WindowPeers::take(std::span<const BlockId> full) {
  for (const BlockId block : full) {
    limit(block, 0);  // left by another holder, who freed the full block
    set(block, pool_.take());
    references_[static_cast<size_t>(block)] = 1;
  }
}

void WindowPeers::share(BlockId full) {
  if (block_of(full) == kNullBlock || pool_.ref_count(block_of(full)) <= 0) return;
  pool_.share(block_of(full));
  ++references_[static_cast<size_t>(full)];
}

bool WindowPeers::drop(BlockId full) {
  const BlockId window = block_of(full);
  if (window == kNullBlock) return false;
  if (--references_[static_cast<size_t>(full)] == 0) set(full, kNullBlock);
  return pool_.ref_count(window) > 0 && pool_.drop(window);  // another holder may have dropped our reference
}

void WindowPeers::limit(BlockId full, int32_t references) {
  while (references_[static_cast<size_t>(full)] > references) drop(full);
}

void WindowPeers::check_invariants() const {
  PC_ASSERT(map_[static_cast<size_t>(map_size() - 1)] == -1);
  std::vector<bool> seen(static_cast<size_t>(pool_.num_blocks()));
  for (BlockId full = 0; full < num_full_blocks_; ++full) {
    const BlockId window = block_of(full);
    PC_ASSERT(window >= 0 && window < pool_.num_blocks() && (full != kNullBlock || window == kNullBlock));
    for (int64_t i = 0; i < block_size_; ++i) {
      const int64_t slot = window == kNullBlock ? 0 : window * block_size_ + i;
      PC_ASSERT(map_[static_cast<size_t>(full * block_size_ + i)] == slot);
    }
    PC_ASSERT((references_[static_cast<size_t>(full)] > 0) == (window != kNullBlock));
    if (window == kNullBlock) continue;
    PC_ASSERT(!seen[static_cast<size_t>(window)]);
    seen[static_cast<size_t>(window)] = true;
  }
}

}  // namespace pagecore
