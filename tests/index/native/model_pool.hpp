// Simple model of BlockPool: the oracle of the drivers.
//
// The model is a value: a caller that may fail keeps a copy and restores it when the call is refused.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <vector>

#include "pagecore/index/pools/block_pool.hpp"
#include "tests/native/harness.hpp"

namespace pagecore::test {

class ModelPool {
 public:
  ModelPool(BlockId num_blocks, Order order) : order_(order), holders_(static_cast<size_t>(num_blocks)) {
    for (BlockId id = 1; id < num_blocks; ++id) free_.push_back(id);
  }

  [[nodiscard]] BlockId num_blocks() const { return static_cast<BlockId>(holders_.size()); }
  [[nodiscard]] BlockId num_free() const { return static_cast<BlockId>(free_.size()); }
  [[nodiscard]] BlockId num_retired() const {
    size_t count = 0;
    for (const auto& [step, blocks] : retired_) count += blocks.size();
    return static_cast<BlockId>(count);
  }
  [[nodiscard]] int32_t holders(BlockId block) const { return holders_[static_cast<size_t>(block)]; }
  [[nodiscard]] const std::vector<int32_t>& all_holders() const { return holders_; }

  // The first free id is the next to be allocated, in every order.
  BlockId take() {
    const auto at = order_ == Order::Address ? std::min_element(free_.begin(), free_.end()) : free_.begin();
    const BlockId block = *at;
    free_.erase(at);
    holders_[static_cast<size_t>(block)] = 1;
    return block;
  }

  void share(BlockId block) { ++held(block); }

  // Returns true if the block became free.
  bool drop(BlockId block) {
    if (--held(block) > 0) return false;
    give_back(block);
    return true;
  }

  // Returns true if the block is retired now.
  bool retire(BlockId block, int64_t step) {
    if (--held(block) > 0) return false;
    retired_[step].push_back(block);
    return true;
  }

  BlockId reclaim(int64_t step) {
    BlockId count = 0;
    while (!retired_.empty() && retired_.begin()->first <= step) {
      for (const BlockId block : retired_.begin()->second) give_back(block);
      count += static_cast<BlockId>(retired_.begin()->second.size());
      retired_.erase(retired_.begin());
    }
    return count;
  }

 private:
  int32_t& held(BlockId block) {
    if (block <= 0 || block >= num_blocks()) fail(ErrorKind::InvalidBlock, "the model refuses block ", block);
    int32_t& count = holders_[static_cast<size_t>(block)];
    if (count == 0) fail(ErrorKind::DoubleFree, "the model refuses block ", block);
    return count;
  }

  void give_back(BlockId block) {
    if (order_ == Order::Lifo) {
      free_.push_front(block);
    } else {
      free_.push_back(block);
    }
  }

  Order order_;
  std::vector<int32_t> holders_;
  std::deque<BlockId> free_;
  std::map<int64_t, std::vector<BlockId>> retired_;
};

// Runs `model` on a copy of `world` and `real` on the code: both succeed, or both raise the same kind of error and
// change nothing. Returns true if they succeeded.
template <typename World, typename Model, typename Real>
bool agree(World& world, const char* what, Model&& model, Real&& real) {
  World next = world;
  bool is_refused = false;
  ErrorKind expected{};
  try {
    model(next);
  } catch (const Error& error) {
    is_refused = true;
    expected = error.kind();
  }
  try {
    real();
  } catch (const Error& error) {
    PC_CHECK(is_refused, what, " refused: ", error.what());
    PC_CHECK(error.kind() == expected, what, " raised another error: ", error.what());
    return false;
  }
  PC_CHECK(!is_refused, what, " was not refused");
  world = std::move(next);
  return true;
}

inline void same_counts(const BlockPool& pool, const ModelPool& model) {
  PC_CHECK(pool.num_free() == model.num_free(), pool.num_free(), " free, expected ", model.num_free());
  PC_CHECK(pool.num_retired() == model.num_retired(), pool.num_retired(), " retired");
  PC_CHECK(pool.num_used() == model.num_blocks() - 1 - model.num_free() - model.num_retired(), pool.num_used());
  Exact<int32_t> counts(static_cast<size_t>(pool.num_blocks()));
  pool.copy_ref_counts(counts.span());
  PC_CHECK(counts.copy() == model.all_holders(), shown(counts.copy()), " held, expected ", shown(model.all_holders()));
}

}  // namespace pagecore::test
