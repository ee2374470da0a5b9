#include "pagecore/index/slots/slot_allocator.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <mutex>
#include <utility>

#include "pagecore/native/checks.hpp"

namespace pagecore {
namespace {

TokenCount checked_block_size(int64_t block_size) {
  constexpr int64_t kMost = std::numeric_limits<TokenCount>::max();
  PC_EXPECTS(block_size >= 1 && block_size <= kMost, ShapeError, "block_size is ", block_size, "; use 1 to ", kMost);
  return static_cast<TokenCount>(block_size);
}

// Prevents the compiler from reading twice: another thread may write to a list of the caller.
template <typename T>
T read_once(const T& value) {
  return __atomic_load_n(&value, __ATOMIC_RELAXED);
}

struct FromTo {
  TokenCount prefix;
  TokenCount length;
};

}  // namespace

SlotAllocator::Pools::Pools(BlockPool& pool, BlockPool* window) : first_(pool) {
  if (window == nullptr) return;
  second_.emplace(*window);
  if (std::less<>{}(window, &pool)) std::swap(first_, *second_);
}

void SlotAllocator::Pools::lock() {
  first_.lock();
  if (second_) second_->lock();
}

void SlotAllocator::Pools::unlock() {
  if (second_) second_->unlock();
  first_.unlock();
}

SlotAllocator::SlotAllocator(std::shared_ptr<BlockPool> pool, int64_t block_size, std::shared_ptr<BlockPool> window)
    : owner_(std::move(pool)),
      pool_(*owner_),
      pools_(*owner_, window.get()),
      num_blocks_(owner_->num_blocks()),
      block_size_(checked_block_size(block_size)),
      claims_(static_cast<size_t>(num_blocks_)) {
  if (window == nullptr) return;
  PC_EXPECTS(window != owner_, UnsupportedOption,
             "the window pool is the full pool; give each its own pool, because a block can hold one of them");
  peers_ = std::make_unique<WindowPeers>(std::move(window), owner_->num_blocks(), block_size);
}

SlotAllocator::~SlotAllocator() {
  const std::lock_guard lock(pools_);
  BlockId lost = kNullBlock;  // ignored: a destructor cannot raise
  give_back(lost);
}

// Planning.

int64_t SlotAllocator::plan_allocate(int64_t num_tokens) {
  forget_plan();
  PC_EXPECTS(num_tokens >= 0, ShapeError, "num_tokens is ", num_tokens, "; use 0 or more");
  growths_.push_back({0, num_tokens, kNullBlock, 0});
  num_planned_slots_ = num_tokens;
  num_planned_blocks_ = num_tokens / block_size() + (num_tokens % block_size() != 0);
  return num_tokens;
}

int64_t SlotAllocator::plan_extend(LengthSpan prefix_lens, LengthSpan seq_lens, SlotSpan last_slots) {
  PC_EXPECTS(prefix_lens.size() == seq_lens.size() && last_slots.size() == seq_lens.size(), ShapeError,
             prefix_lens.size(), " prefix_lens, ", seq_lens.size(), " seq_lens and ", last_slots.size(),
             " last_slots are given; give one of each for every sequence");
  return plan([&](size_t i) { return FromTo{prefix_lens[i], seq_lens[i]}; }, seq_lens.size(), last_slots);
}

int64_t SlotAllocator::plan_decode(LengthSpan seq_lens, SlotSpan last_slots) {
  PC_EXPECTS(last_slots.size() == seq_lens.size(), ShapeError, seq_lens.size(), " seq_lens and ", last_slots.size(),
             " last_slots are given; give one of each for every sequence");
  const auto lengths_of = [&](size_t i) {
    const TokenCount length = read_once(seq_lens[i]);
    PC_EXPECTS(length >= 1, ShapeError, "sequence ", i, " has ", length,
               " tokens; seq_lens count the new one, so they start at 1");
    return FromTo{length - 1, length};
  };
  return plan(lengths_of, seq_lens.size(), last_slots);
}

template <typename LengthsOf>
int64_t SlotAllocator::plan(LengthsOf lengths_of, size_t num_sequences, SlotSpan last_slots) {
  forget_plan();
  growths_.reserve(num_sequences);
  int64_t num_slots = 0;
  int64_t num_blocks = 0;
  for (size_t i = 0; i < num_sequences; ++i) {
    const auto [prefix, length] = lengths_of(i);
    const Growth grown = growth(i, prefix, length, read_once(last_slots[i]));
    num_slots += grown.head + grown.rest;
    num_blocks += block_size_.ceil(static_cast<TokenCount>(grown.rest));
    growths_.push_back(grown);
  }
  num_planned_slots_ = num_slots;
  num_planned_blocks_ = num_blocks;
  return num_slots;
}

SlotAllocator::Growth SlotAllocator::growth(size_t sequence, TokenCount prefix, TokenCount length, SlotId last) const {
  PC_EXPECTS(prefix >= 0 && prefix <= length, ShapeError, "sequence ", sequence, " cannot grow from ", prefix, " to ",
             length, " tokens; use 0 <= prefix_len <= seq_len");
  if (prefix == 0) return {0, length, kNullBlock, 0};
  PC_EXPECTS(last >= block_size() && last < num_slots(), InvalidBlock, "last slot ", last, " of sequence ", sequence,
             " is not in a block of the pool; slots run from ", block_size(), " to ", num_slots() - 1);
  const int64_t block = block_size_.floor_wide(last);
  const int64_t offset = last - block * block_size() + 1;  // of the next slot
  const TokenCount filled = prefix - block_size_.floor(prefix) * block_size_.divisor();
  PC_EXPECTS(offset == (filled == 0 ? block_size() : filled), ShapeError, "last slot ", last, " of sequence ", sequence,
             " is not where a prefix of ", prefix, " tokens ends in blocks of ", block_size(),
             "; (last_slot + 1) % block_size must be prefix_len % block_size");
  const auto left = filled == 0 ? 0 : static_cast<TokenCount>(block_size() - offset);
  const TokenCount head = std::min(length - prefix, left);
  return {last + 1, length - prefix - head, static_cast<BlockId>(block), head};
}

void SlotAllocator::forget_plan() {
  growths_.clear();
  num_planned_slots_ = 0;
  num_planned_blocks_ = 0;
}

// Committing.

void SlotAllocator::check_held(const Growth& growth) const {
  PC_EXPECTS(growth.head == 0 || pool_.ref_count(growth.block) > claims_[static_cast<size_t>(growth.block)], DoubleFree,
             "slot ", growth.next, " cannot be taken: block ", growth.block,
             " is free; extend a sequence before its slots are freed");
  PC_EXPECTS(growth.head == 0 || peers_ == nullptr || peers_->block_of(growth.block) != kNullBlock, InvalidBlock,
             "slot ", growth.next, " cannot be taken: the window block of block ", growth.block,
             " was released; release only blocks that the window of the sequence has passed, not its last one");
}

// The pool is locked.
bool SlotAllocator::is_served() const {
  for (const Growth& growth : growths_) check_held(growth);
  num_free_seen_ = pool_.num_free();
  num_free_window_seen_ = peers_ == nullptr ? num_planned_blocks_ : peers_->pool().num_free();
  return num_planned_blocks_ <= std::min(num_free_seen_, num_free_window_seen_);
}

bool SlotAllocator::has_room() {
  const std::lock_guard lock(pools_);
  return is_served();
}

bool SlotAllocator::try_commit(const SlotsOut& out) {
  PC_EXPECTS(out.size >= num_planned_slots_, ShapeError, "out has room for ", out.size, " slots; the step has ",
             num_planned_slots_);
  PC_EXPECTS(out.type == SlotType::Int64 || num_slots() <= kMaxNarrowSlots, ShapeError, "the pool has ", num_slots(),
             " slots; int32 slots allow up to ", kMaxNarrowSlots, ", use int64 slots or a smaller pool");
  {
    const std::lock_guard lock(pools_);
    if (!is_served()) return false;
    taken_.resize(static_cast<size_t>(num_planned_blocks_));
    pool_.take(taken_);
    if (peers_ != nullptr) peers_->take(taken_);
  }
  if (out.type == SlotType::Int64) {
    write_slots(static_cast<int64_t*>(out.data));
  } else {
    write_slots(static_cast<int32_t*>(out.data));
  }
  forget_plan();
  return true;
}

template <typename Slot>
void SlotAllocator::write_slots(Slot* out) const {
  const BlockId* block = taken_.data();
  if (block_size() == 1) {  // each slot is a block: blocks are never continued
    std::copy(taken_.begin(), taken_.end(), out);
    return;
  }
  for (const Growth& growth : growths_) {
    out = write_run(out, growth.next, growth.head);
    for (int64_t rest = growth.rest; rest > 0; rest -= block_size()) {
      out = write_run(out, *block++ * block_size(), std::min(rest, block_size()));
    }
  }
}

void SlotAllocator::fail_out_of_blocks() const {
  if (peers_ != nullptr) {
    throw Error(
        concat(num_planned_blocks_, " blocks of each pool are needed; ", num_free_seen_, " of ", num_blocks_ - 1,
               " are free in the full pool and ", num_free_window_seen_, " of ", peers_->pool().num_blocks() - 1,
               " in the window pool; free some slots, release what windows have passed, or make the pools "
               "larger"),
        {num_planned_blocks_, num_planned_blocks_}, {num_free_seen_, num_free_window_seen_});
  }
  throw Error(concat(num_planned_blocks_, " blocks are needed and ", num_free_seen_, " of ", num_blocks_ - 1,
                     " are free; free some slots or make the pool larger"),
              {num_planned_blocks_}, {num_free_seen_});
}

// Freeing.

BlockId SlotAllocator::free(SlotSpan slots) {
  const size_t first = claimed_.size();
  try {
    append_blocks(slots, claimed_);
    const std::lock_guard lock(pools_);
    claim_from(first);
    BlockId lost = kNullBlock;  // stays null: claim_from() has checked the blocks under this lock
    return depth_ > 0 ? 0 : give_back(lost);
  } catch (...) {
    claimed_.resize(first);
    throw;
  }
}

void SlotAllocator::check_listed(const char* verb) const {
  for (const BlockId block : listed_) {
    PC_EXPECTS(pool_.ref_count(block) > claims_[static_cast<size_t>(block)], DoubleFree, "block ", block, " (slots ",
               block * block_size(), " to ", (block + 1) * block_size() - 1, ") cannot be ", verb,
               ": it is free or about to be freed; do so before its slots are freed");
  }
}

BlockId SlotAllocator::release_window(SlotSpan slots) {
  PC_ASSERT(peers_ != nullptr);
  listed_.clear();
  append_blocks(slots, listed_);
  const std::lock_guard lock(pools_);
  check_listed("released");
  BlockId freed = 0;
  for (const BlockId block : listed_) freed += peers_->drop(block);
  return freed;
}

void SlotAllocator::share(SlotSpan slots) {
  listed_.clear();
  append_blocks(slots, listed_);
  const std::lock_guard lock(pools_);
  check_listed("shared");
  for (const BlockId block : listed_) {
    pool_.share(block);
    if (peers_ != nullptr) peers_->share(block);
  }
}

BlockId SlotAllocator::end_group() {
  PC_ASSERT(depth_ > 0);
  if (--depth_ > 0) return 0;
  BlockId lost = kNullBlock;
  const std::lock_guard lock(pools_);
  const BlockId freed = give_back(lost);
  PC_EXPECTS(lost == kNullBlock, DoubleFree, "block ", lost,
             " of the group was freed by another holder before the end of the group; the other blocks were freed");
  return freed;
}

void SlotAllocator::append_blocks(SlotSpan slots, std::vector<BlockId>& blocks) const {
  const int64_t size = block_size();
  for (size_t at = 0; at < slots.size();) {
    const SlotId start = read_once(slots[at]);
    blocks.push_back(block_started_by(start));
    const size_t stop = std::min(slots.size(), at + static_cast<size_t>(size));
    for (SlotId next = start + 1; ++at < stop && slots[at] == next; ++next) {
    }
  }
}

BlockId SlotAllocator::block_started_by(SlotId slot) const {
  PC_EXPECTS(slot >= 0 && slot < num_slots(), InvalidBlock, "slot ", slot,
             " cannot be freed: it is outside its pool; slots run from ", block_size(), " to ", num_slots() - 1);
  const int64_t block = block_size_.floor_wide(slot);
  PC_EXPECTS(block != kNullBlock, InvalidBlock, "slot ", slot,
             " cannot be freed: it is in block 0, the null block; leave padding out of the list");
  PC_EXPECTS(slot == block * block_size(), InvalidBlock, "slot ", slot, " cannot be freed: it neither starts block ",
             block, " nor continues the slot before it in the list; free whole blocks, each from its first slot ",
             block * block_size(), " on");
  return static_cast<BlockId>(block);
}

void SlotAllocator::claim_from(size_t first) {
  for (size_t i = first; i < claimed_.size(); ++i) {
    const BlockId block = claimed_[i];
    if (++claims_[static_cast<size_t>(block)] <= pool_.ref_count(block)) continue;
    for (size_t j = first; j <= i; ++j) --claims_[static_cast<size_t>(claimed_[j])];
    refuse(block);
  }
}

void SlotAllocator::refuse(BlockId block) const {
  fail(ErrorKind::DoubleFree, "block ", block, " (slots ", block * block_size(), " to ", (block + 1) * block_size() - 1,
       ") cannot be freed: ",
       pool_.ref_count(block) < 0 ? "it is retired already"
                                  : "it is free, or the call drops more references than it has",
       "; drop every reference once");
}

BlockId SlotAllocator::give_back(BlockId& lost) {
  BlockId freed = 0;
  for (const BlockId block : claimed_) {
    claims_[static_cast<size_t>(block)] = 0;
    if (pool_.ref_count(block) > 0) {
      if (peers_ != nullptr) peers_->limit(block, pool_.ref_count(block) - 1);
      freed += pool_.drop(block);
    } else {
      lost = block;
    }
  }
  claimed_.clear();
  return freed;
}

// Contents.

int64_t SlotAllocator::num_available() const {
  const std::lock_guard lock(pools_);
  const BlockId free = pool_.num_free();
  return (peers_ == nullptr ? free : std::min(free, peers_->pool().num_free())) * block_size();
}

size_t SlotAllocator::nbytes() const {
  return sizeof(*this) + claims_.nbytes() + growths_.capacity() * sizeof(Growth) +
         (taken_.capacity() + claimed_.capacity() + listed_.capacity()) * sizeof(BlockId) +
         (peers_ == nullptr ? 0 : peers_->nbytes());
}

void SlotAllocator::check_invariants() const {
  PC_ASSERT(depth_ >= 0 && (depth_ > 0 || claimed_.empty()));
  std::vector<int32_t> counted(static_cast<size_t>(num_blocks_));
  for (const BlockId block : claimed_) {
    PC_ASSERT(block > kNullBlock && block < num_blocks_);
    ++counted[static_cast<size_t>(block)];
  }
  for (size_t block = 0; block < counted.size(); ++block) PC_ASSERT(counted[block] == claims_[block]);
  if (peers_ != nullptr) peers_->check_invariants();
}

}  // namespace pagecore
