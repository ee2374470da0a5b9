// Kernels that test the primitives one by one; they store the results in `out`.
#include "probe.h"

namespace pagecore {

// out[block][thread][11]
PC_KERNEL(128, 1) void places(const PcProbe params) {
  const int block = (pc_block_z() * pc_num_blocks_y() + pc_block_y()) * pc_num_blocks_x() + pc_block_x();
  const Global<int> out = Global<int>(params.out) + (block * pc_num_threads() + pc_thread()) * 11;
  out.store(0, pc_thread());
  out.store(1, pc_num_threads());
  out.store(2, pc_lane());
  out.store(3, pc_warp());
  out.store(4, pc_block_x());
  out.store(5, pc_block_y());
  out.store(6, pc_block_z());
  out.store(7, pc_num_blocks_x());
  out.store(8, pc_num_blocks_y());
  out.store(9, pc_num_blocks_z());
  out.store(10, static_cast<bool>(Global<int>(params.in)) ? 1 : 0);
}

// in: int [thread], extra: operands. out[6][thread]
PC_KERNEL(64, 1) void exchanges(const PcProbe params) {
  const int t = pc_thread();
  const int n = pc_num_threads();
  const int value = Global<int>(params.in).load(t);
  const int operand = Global<int>(params.extra).load(t);
  const Global<pc_uint32> out(params.out);
  const float real = static_cast<float>(value);
  out.store(t, static_cast<pc_uint32>(pc_shuffle_xor(value, operand)));
  out.store(n + t, pc_float_to_bits(pc_shuffle_xor(real, operand)));
  out.store(2 * n + t, static_cast<pc_uint32>(pc_shuffle(value, operand)));
  out.store(3 * n + t, pc_float_to_bits(pc_shuffle(real, operand)));
  out.store(4 * n + t, static_cast<pc_uint32>(pc_shuffle_up(value, operand)));
  out.store(5 * n + t, pc_ballot(value > 0));
}

// Copies n vectors from `in` to `out` through the shared buffer. m: 0 load_vector, 1 load_vector_once, 2 asynchronous
// copies, every third of which is not valid.
PC_KERNEL(128, 1) void vectors(const PcProbe params) {
  const Global<pc_half> in(params.in);
  const Global<pc_half> out = Global<pc_uint8>(params.out).as<pc_half>();
  const Shared<pc_half> held = (pc_shared_buffer() + 16).as<pc_half>();
  const int t = pc_thread();
  const bool mine = t < params.n;
  if (params.m == 2) {
    pc_copy_async((held + t * 8).address(0), in + 8 * t, 0, mine && t % 3 != 2);
    pc_commit_copies();
    pc_wait_copies<0>();
  } else {
    pc_vector v{};
    if (mine) v = params.m == 0 ? in.load_vector(t * 8) : in.load_vector_once(t * 8);
    held.store_vector(t * 8, v);
  }
  pc_sync_block();
  const int other = pc_num_threads() - 1 - t;
  if (other < params.n) out.store_vector(other * 8, held.load_vector(other * 8));
}

// out: int counters [2], extra: unsigned long long [1].
PC_KERNEL(128, 1) void atomics(const PcProbe params) {
  const Global<int> out(params.out);
  const int ticket = out.atomic_add(0, params.n);
  pc_fence_device();
  if (ticket == params.m) out.atomic_add(1, pc_block_x() + 1);
  const pc_uint64 id = static_cast<pc_uint64>(pc_block_x()) * pc_num_threads() + pc_thread();
  Global<pc_uint64>(params.extra).atomic_min(0, (id * 37 + 5) % 256);
}

// in: 16-bit [32][8], the rows of four matrices, stored in shared memory last row first. out: [lane][4]
template <int kTransposed>
PC_KERNEL(32, 1)
void matrices(const PcProbe params) {
  const Shared<pc_uint16> held = pc_shared_buffer().as<pc_uint16>();
  const int lane = pc_lane();
  const Shared<pc_uint16> row = held + (31 - lane) * 8;
  row.store_vector(0, Global<pc_uint16>(params.in).load_vector(lane * 8));
  pc_sync_warp();
  pc_uint32 r[4];
  if (kTransposed) {
    pc_load_matrices_transposed(r, row.address(0));
  } else {
    pc_load_matrices(r, row.address(0));
  }
  for (int i = 0; i < 4; ++i) Global<pc_uint32>(params.out).store(lane * 4 + i, r[i]);
}

// in: [lane][a0 a1 a2 a3 b0 b1], out: float [lane][4], c before and after
template <typename T>
PC_KERNEL(32, 1)
void product(const PcProbe params) {
  const Global<pc_uint32> in = Global<pc_uint32>(params.in) + pc_lane() * 6;
  const Global<float> out = Global<float>(params.out) + pc_lane() * 4;
  pc_uint32 a[4];
  float c[4];
  PC_UNROLL for (int i = 0; i < 4; ++i) a[i] = in.load(i);
  PC_UNROLL for (int i = 0; i < 4; ++i) c[i] = out.load(i);
  pc_multiply<T>(c, a, in.load(4), in.load(5));
  PC_UNROLL for (int i = 0; i < 4; ++i) out.store(i, c[i]);
}

// in: T [n], out: float [n]
template <typename T>
PC_KERNEL(256, 1)
void widen(const PcProbe params) {
  const int i = pc_block_x() * pc_num_threads() + pc_thread();
  if (i < params.n) Global<float>(params.out).store(i, pc_to_float(Global<T>(params.in).load(i)));
}

// in: float [n], out: T [n], extra: T [n], by pc_pack of pairs
template <typename T>
PC_KERNEL(256, 1)
void narrow(const PcProbe params) {
  const int i = pc_block_x() * pc_num_threads() + pc_thread();
  if (i >= params.n) return;
  const Global<float> in(params.in);
  Global<T>(params.out).store(i, pc_from_float<T>(in.load(i)));
  if (i % 2 == 0 && i + 1 < params.n) {
    Global<pc_uint32>(params.extra).store(i / 2, pc_pack<T>(in.load(i), in.load(i + 1)));
  }
}

// Copies n words from `in` to `out` through the shared buffer; every third becomes 0.
PC_KERNEL(128, 1) void copied_words(const PcProbe params) {
  const Shared<pc_uint32> held = pc_shared_buffer().as<pc_uint32>();
  const int t = pc_thread();
  pc_copy_word_async(held.address(t), Global<pc_uint8>(params.in), 4 * t, t < params.n && t % 3 != 2);
  pc_commit_copies();
  pc_wait_copies<0>();
  pc_sync_block();
  const int other = pc_num_threads() - 1 - t;
  if (other < params.n) Global<pc_uint32>(params.out).store(other, held.load(other));
}

// in: float [n][3], out: float [n][5]
PC_KERNEL(256, 1) void functions(const PcProbe params) {
  const int i = pc_block_x() * pc_num_threads() + pc_thread();
  if (i >= params.n) return;
  const Global<float> in = Global<float>(params.in) + static_cast<pc_int64>(i) * 3;
  const Global<float> out = Global<float>(params.out) + static_cast<pc_int64>(i) * 5;
  const float a = in.load(0);
  out.store(0, pc_exp2(a));
  out.store(1, pc_log2(a));
  out.store(2, pc_max(a, in.load(1)));
  out.store(3, pc_fma(a, in.load(1), in.load(2)));
  out.store(4, pc_bits_to_float(pc_float_to_bits(a) ^ 0x80000000u) + pc_infinity());
}

}  // namespace pagecore
