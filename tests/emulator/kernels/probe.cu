#include "primitives.cuh"

namespace pagecore {

struct PcProbe {
  pc_address in;
  pc_address out;
  pc_int32 n;
  pc_int32 pad;
};

template <typename T>
PC_KERNEL(128, 1)
void scale(const PcProbe params) {
  const Global<T> in(params.in);
  const Global<T> out(params.out);
  const int i = pc_block_x() * pc_num_threads() + pc_thread();
  if (i < params.n) out.store(i, pc_from_float<T>(pc_to_float(in.load(i)) * 2.0f));
}

PC_KERNEL(128, 1) void exchange(const PcProbe params) {
  const Shared<int> buffer = pc_shared_buffer().as<int>();
  buffer.store(pc_thread(), pc_thread());
  if (params.n) pc_sync_block();
  Global<int>(params.out).store(pc_thread(), buffer.load(pc_num_threads() - 1 - pc_thread()));
}

}  // namespace pagecore
