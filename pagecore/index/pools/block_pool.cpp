#include "pagecore/index/pools/block_pool.hpp"

#include <algorithm>
#include <limits>
#include <mutex>
#include <vector>

#include "pagecore/native/checks.hpp"

namespace pagecore {
namespace {

constexpr int32_t kMaxRefCount = std::numeric_limits<int32_t>::max();
constexpr const char* kOverdrawn = "it is free, or the list drops more references than it has";
constexpr const char* kDropOnce = "drop every reference once";

BlockId checked_num_blocks(int64_t num_blocks) {
  PC_EXPECTS(num_blocks >= 2, ShapeError, "num_blocks is ", num_blocks,
             "; it must be at least 2 because block 0 is the reserved null block");
  PC_EXPECTS(num_blocks <= std::numeric_limits<BlockId>::max(), ShapeError, "num_blocks is ", num_blocks,
             "; block ids have 32 bits, use at most ", std::numeric_limits<BlockId>::max());
  return static_cast<BlockId>(num_blocks);
}

}  // namespace

BlockPool::BlockPool(int64_t num_blocks, Order order)
    : num_blocks_(checked_num_blocks(num_blocks)),
      free_(num_blocks_, order),
      ref_count_(static_cast<size_t>(num_blocks_)),
      next_(static_cast<size_t>(num_blocks_)) {}

bool BlockPool::try_allocate(std::span<BlockId> out) {
  const std::lock_guard lock(mutex_);
  if (out.size() > static_cast<size_t>(free_.size())) return false;
  free_.take(out);
  for (const BlockId block : out) ref_count_[static_cast<size_t>(block)] = 1;
  return true;
}

void BlockPool::share(std::span<const BlockId> blocks) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const BlockId block = blocks[i];
    if (!is_held(block) || ref_count_[static_cast<size_t>(block)] == kMaxRefCount) [[unlikely]] {
      undo_shares(blocks.first(i));
      refuse(block, "shared", "it is free", "share a block while it has references");
    }
    ++ref_count_[static_cast<size_t>(block)];
  }
}

BlockId BlockPool::free(std::span<const BlockId> blocks) {
  const std::lock_guard lock(mutex_);
  const BlockId before = free_.size();
  size_t done = 0;
  free_.push_many([&](auto push) {
    for (; done < blocks.size() && is_held(blocks[done]); ++done) {
      if (--ref_count_[static_cast<size_t>(blocks[done])] == 0) push(blocks[done]);
    }
  });
  if (done < blocks.size()) [[unlikely]] {
    undo_drops(blocks.first(done));
    refuse(blocks[done], "freed", kOverdrawn, kDropOnce);
  }
  return free_.size() - before;
}

BlockId BlockPool::retire(std::span<const BlockId> blocks, int64_t step) {
  const std::lock_guard lock(mutex_);
  const auto at = retired_.try_emplace(step).first;
  Chain& chain = at->second;
  const Chain before = chain;
  const BlockId num_before = num_retired_;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const BlockId block = blocks[i];
    if (!is_held(block)) [[unlikely]] {
      undo_retirements(blocks.first(i), chain, before);
      if (chain.head == kNullBlock) retired_.erase(at);
      refuse(block, "retired", kOverdrawn, kDropOnce);
    }
    if (--ref_count_[static_cast<size_t>(block)] == 0) append(chain, block);
  }
  if (chain.head == kNullBlock) retired_.erase(at);
  return num_retired_ - num_before;
}

BlockId BlockPool::reclaim(int64_t step) {
  const std::lock_guard lock(mutex_);
  const BlockId before = num_retired_;
  auto at = retired_.begin();
  for (; at != retired_.end() && at->first <= step; ++at) {
    for (BlockId block = at->second.head; block != kNullBlock; block = next_[static_cast<size_t>(block)]) {
      ref_count_[static_cast<size_t>(block)] = 0;
      free_.push(block);
      --num_retired_;
    }
  }
  retired_.erase(retired_.begin(), at);
  return before - num_retired_;
}

int32_t BlockPool::ref_count(int64_t block) const {
  PC_EXPECTS(block >= 0 && block < num_blocks_, InvalidBlock, "block ", block, " is outside its pool of ", num_blocks_,
             " blocks; ids run from 0 to ", num_blocks_ - 1);
  const std::lock_guard lock(mutex_);
  return std::max(ref_count_[static_cast<size_t>(block)], 0);
}

void BlockPool::copy_ref_counts(std::span<int32_t> out) const {
  const std::lock_guard lock(mutex_);
  PC_ASSERT(out.size() == static_cast<size_t>(num_blocks_));
  for (size_t i = 0; i < out.size(); ++i) out[i] = std::max(ref_count_[i], 0);
}

BlockId BlockPool::num_free() const {
  const std::lock_guard lock(mutex_);
  return free_.size();
}

BlockId BlockPool::num_used() const {
  const std::lock_guard lock(mutex_);
  return num_blocks_ - 1 - free_.size() - num_retired_;
}

BlockId BlockPool::num_retired() const {
  const std::lock_guard lock(mutex_);
  return num_retired_;
}

size_t BlockPool::nbytes() const {
  const std::lock_guard lock(mutex_);
  return sizeof(*this) + free_.nbytes() + ref_count_.nbytes() + next_.nbytes();
}

void BlockPool::append(Chain& chain, BlockId block) {
  ref_count_[static_cast<size_t>(block)] = kRetired;
  next_[static_cast<size_t>(block)] = kNullBlock;
  if (chain.head == kNullBlock) {
    chain.head = block;
  } else {
    next_[static_cast<size_t>(chain.tail)] = block;
  }
  chain.tail = block;
  ++num_retired_;
}

void BlockPool::refuse(BlockId block, const char* verb, const char* free, const char* remedy) const {
  PC_EXPECTS(block >= 0 && block < num_blocks_, InvalidBlock, "block ", block, " cannot be ", verb,
             ": it is outside its pool of ", num_blocks_, " blocks; ids run from 1 to ", num_blocks_ - 1);
  PC_EXPECTS(block != kNullBlock, InvalidBlock, "block 0 cannot be ", verb,
             ": it is the null block, which has no references; leave padding out of the list");
  const int32_t count = ref_count_[static_cast<size_t>(block)];
  PC_EXPECTS(count < kMaxRefCount, ShapeError, "block ", block, " cannot be ", verb, ": it has ", count,
             " references, the maximum; free some first");
  fail(ErrorKind::DoubleFree, "block ", block, " cannot be ", verb, ": ",
       count == kRetired ? "it is retired already" : free, "; ", remedy);
}

void BlockPool::undo_shares(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) --ref_count_[static_cast<size_t>(block)];
}

void BlockPool::undo_drops(std::span<const BlockId> blocks) {
  for (size_t i = blocks.size(); i-- > 0;) {
    if (ref_count_[static_cast<size_t>(blocks[i])]++ == 0) free_.take_back(blocks[i]);
  }
}

void BlockPool::undo_retirements(std::span<const BlockId> blocks, Chain& chain, Chain before) {
  for (size_t i = blocks.size(); i-- > 0;) {
    int32_t& count = ref_count_[static_cast<size_t>(blocks[i])];
    if (count == kRetired) {
      count = 0;
      --num_retired_;
    }
    ++count;
  }
  chain = before;  // the blocks of this call follow the old tail
  if (chain.tail != kNullBlock) next_[static_cast<size_t>(chain.tail)] = kNullBlock;
}

size_t BlockPool::num_unshared(std::span<const BlockId> blocks) const {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  while (count < blocks.size() && ref_count_[static_cast<size_t>(blocks[count])] <= 1) ++count;
  return count;
}

void BlockPool::find_held_once(std::span<const BlockId> blocks, std::vector<int32_t>& out) const {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (ref_count_[static_cast<size_t>(blocks[i])] == 1) out.push_back(static_cast<int32_t>(i));
  }
}

void BlockPool::check_invariants() const {
  const std::lock_guard lock(mutex_);
  free_.check_invariants();
  std::vector<bool> seen(static_cast<size_t>(num_blocks_));
  free_.for_each([&](BlockId block) {
    PC_ASSERT(block > kNullBlock && block < num_blocks_);
    PC_ASSERT(!seen[static_cast<size_t>(block)] && ref_count_[static_cast<size_t>(block)] == 0);
    seen[static_cast<size_t>(block)] = true;
  });
  PC_ASSERT(ref_count_[kNullBlock] == 0);
  int64_t num_zero = 0;
  int64_t num_retired = 0;
  for (size_t i = 1; i < static_cast<size_t>(num_blocks_); ++i) {
    PC_ASSERT(ref_count_[i] >= kRetired);
    num_zero += ref_count_[i] == 0;
    num_retired += ref_count_[i] == kRetired;
  }
  PC_ASSERT(num_zero == free_.size() && num_retired == num_retired_);
  check_chains();
}

void BlockPool::check_chains() const {
  BlockId num_chained = 0;
  for (const auto& [step, chain] : retired_) {
    PC_ASSERT(chain.head != kNullBlock);
    BlockId last = kNullBlock;
    for (BlockId block = chain.head; block != kNullBlock; block = next_[static_cast<size_t>(block)]) {
      PC_ASSERT(ref_count_[static_cast<size_t>(block)] == kRetired && ++num_chained <= num_retired_);
      last = block;
    }
    PC_ASSERT(last == chain.tail);
  }
  PC_ASSERT(num_chained == num_retired_);
}

}  // namespace pagecore
