// The last block to arrive adds up the numbers that all blocks have written, as split attention does.
//
//   in      int [blocks][64]
//   out     int [64], the sum
//   extra   int [blocks][64], the numbers of each block, and a counter after them
#include "probe.h"

namespace pagecore {

PC_KERNEL(64, 1) void tickets(const PcProbe params) {
  const int t = pc_thread();
  const int blocks = pc_num_blocks_x();
  const Global<int> parts(params.extra);
  const Global<int> counter = parts + blocks * 64;
  const Shared<int> flag = pc_shared_buffer().as<int>();
  const int block = pc_block_x(), at = 63 - t;  // fault: target_of_part
  parts.store(block * 64 + at, Global<int>(params.in).load(pc_block_x() * 64 + t));

  pc_sync_block();  // fault: barrier_before_ticket
  if (t == 0) {
    pc_fence_device();  // fault: fence_before_ticket
    const bool last = counter.atomic_add(0, 1) == blocks - 1;
    pc_fence_device();  // fault: fence_after_ticket
    if (last) counter.store(0, 0);
    flag.store(0, last ? 1 : 0);
  }
  pc_sync_block();                // fault: barrier_after_ticket
  if (flag.load(0) == 0) return;  // fault: join
  int sum = 0;
  for (int b = 0; b < blocks; ++b) sum += parts.load(b * 64 + 63 - t);
  Global<int>(params.out).store(t, sum);
}

}  // namespace pagecore
