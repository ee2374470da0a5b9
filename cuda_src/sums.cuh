// Sums over a block of threads.
#pragma once

#include "abi_moves.h"
#include "primitives.cuh"

namespace pagecore {

// The sum over all threads of the block, PC_MOVE_THREADS of them; takes PC_MOVE_SHARED_BYTES of the shared buffer.
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
  for (int i = 0; i < PC_MOVE_THREADS / 32; ++i) total += sums.load(i);
  return total;
}

}  // namespace pagecore
