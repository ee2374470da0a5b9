// Scoped lock of several pools, so that a batch reads and changes them atomically.
#pragma once

#include <ranges>
#include <vector>

#include "pagecore/index/pools/block_pool.hpp"

namespace pagecore {

class PoolsLock {
 public:
  // `pools` are distinct and sorted by address, so that two holders cannot deadlock.
  explicit PoolsLock(std::vector<BlockPool::Transaction>& pools) : pools_(pools) {
    for (auto& pool : pools_) pool.lock();
  }
  ~PoolsLock() {
    for (auto& pool : std::views::reverse(pools_)) pool.unlock();
  }
  PoolsLock(const PoolsLock&) = delete;
  PoolsLock& operator=(const PoolsLock&) = delete;

 private:
  std::vector<BlockPool::Transaction>& pools_;
};

}  // namespace pagecore
