// Sums over the threads of the kernel that plans.
#pragma once

#include "abi_plan.h"
#include "primitives.cuh"

namespace pagecore {

// Sums over the block, of 64 bits.
class BlockSum {
 public:
  PC_MEMBER explicit BlockSum(const Shared<pc_int64>& totals) : totals_(totals) {}

  // Returns the sum of the threads before this one; `all` becomes the sum of all threads.
  PC_MEMBER pc_int64 before(pc_int64 value, pc_int64& all) const {
    pc_int64 sum = value;
    for (int delta = 1; delta < 32; delta *= 2) {
      const int low = pc_shuffle_up(static_cast<int>(sum), delta);
      const int high = pc_shuffle_up(static_cast<int>(sum >> 32), delta);
      if (pc_lane() >= delta) sum += static_cast<pc_int64>(high) << 32 | static_cast<pc_uint32>(low);
    }
    pc_sync_block();  // the totals of the sum before have been read
    if (pc_lane() == 31) totals_.store(pc_warp(), sum);
    pc_sync_block();
    pc_int64 earlier = 0;
    all = 0;
    for (int w = 0; w < PC_PLAN_THREADS / 32; ++w) {
      const pc_int64 total = totals_.load(w);
      if (w < pc_warp()) earlier += total;
      all += total;
    }
    return earlier + sum - value;
  }

 private:
  Shared<pc_int64> totals_;
};

}  // namespace pagecore
