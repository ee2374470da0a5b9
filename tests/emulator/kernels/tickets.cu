// The last block to arrive adds up what all have written, as split attention does it. in: int [blocks][64], out: the
// sum [64], extra: [blocks][64] of the blocks' own and a counter behind them.
#include "probe.h"

namespace pagecore {

PC_KERNEL(64, 1) void tickets(const PcProbe params) {
  const int t = pc_thread();
  const int blocks = pc_num_blocks_x();
  const Global<int> parts(params.extra);
  const Global<int> counter = parts + blocks * 64;
  const Shared<int> flag = pc_shared_buffer().as<int>();
  parts.store(pc_block_x() * 64 + 63 - t, Global<int>(params.in).load(pc_block_x() * 64 + t));

  pc_sync_block();  // the block has written
  if (t == 0) {
    pc_fence_device();  // for the others
    const bool last = counter.atomic_add(0, 1) == blocks - 1;
    pc_fence_device();  // of the others
    if (last) counter.store(0, 0);
    flag.store(0, last ? 1 : 0);
  }
  pc_sync_block();  // the flag is there
  if (flag.load(0) == 0) return;
  int sum = 0;
  for (int b = 0; b < blocks; ++b) sum += parts.load(b * 64 + 63 - t);
  Global<int>(params.out).store(t, sum);
}

}  // namespace pagecore
