// Sums and prefix sums over the threads of a block.
#pragma once

#include "cuda_src/device/primitives.cuh"

namespace pagecore {

// Returns the sum over the kThreads threads of the block. Uses kThreads / 32 * 8 bytes at the start of the shared
// buffer, once per kernel.
template <int kThreads>
PC_DEVICE pc_int64 sum_over_block(pc_int64 value) {
  const Shared<pc_int64> sums = pc_shared_buffer().as<pc_int64>();
  for (int mask = 16; mask > 0; mask /= 2) {
    const pc_uint64 bits = static_cast<pc_uint64>(value);
    const int low = pc_shuffle_xor(static_cast<int>(static_cast<pc_uint32>(bits)), mask);
    const int high = pc_shuffle_xor(static_cast<int>(static_cast<pc_uint32>(bits >> 32)), mask);
    value +=
        static_cast<pc_int64>(static_cast<pc_uint64>(static_cast<pc_uint32>(high)) << 32 | static_cast<pc_uint32>(low));
  }
  if (pc_lane() == 0) sums.store(pc_warp(), value);
  pc_sync_block();
  pc_int64 total = 0;
  for (int i = 0; i < kThreads / 32; ++i) total += sums.load(i);
  return total;
}

// Exclusive prefix sums over the kThreads threads of the block.
template <int kThreads>
class BlockScan {
 public:
  // `totals`: kThreads / 32 words of shared memory, one for each warp.
  PC_MEMBER explicit BlockScan(const Shared<pc_int64>& totals) : totals_(totals) {}

  // Returns the sum over the threads before this one; sets `total` to the sum over all threads.
  PC_MEMBER pc_int64 exclusive_sum(pc_int64 value, pc_int64& total) const {
    pc_int64 sum = value;
    for (int delta = 1; delta < 32; delta *= 2) {
      const int low = pc_shuffle_up(static_cast<int>(sum), delta);
      const int high = pc_shuffle_up(static_cast<int>(sum >> 32), delta);
      if (pc_lane() >= delta) sum += static_cast<pc_int64>(high) << 32 | static_cast<pc_uint32>(low);
    }
    pc_sync_block();  // every thread has read the totals of the previous scan
    if (pc_lane() == 31) totals_.store(pc_warp(), sum);
    pc_sync_block();
    pc_int64 earlier = 0;
    total = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      const pc_int64 of_warp = totals_.load(w);
      if (w < pc_warp()) earlier += of_warp;
      total += of_warp;
    }
    return earlier + sum - value;
  }

 private:
  Shared<pc_int64> totals_;
};

}  // namespace pagecore
