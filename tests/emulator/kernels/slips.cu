// Faults of one line each. PcProbe::n selects one (Slip, which the test reads from this file), and m is its argument.
#include "probe.h"

namespace pagecore {

enum Slip : pc_int32 {
  SLIP_NONE,
  SLIP_READ_GLOBAL,   // element t + m
  SLIP_WRITE_GLOBAL,  // element t + m
  SLIP_WRITE_SHARED,  // element t + m
  SLIP_READ_UNINITIALISED,
  SLIP_MISALIGNED_GLOBAL_VECTOR,
  SLIP_MISALIGNED_SHARED_VECTOR,
  SLIP_MISALIGNED_GLOBAL_READ,
  SLIP_WARP_BARRIER_UNDER_DIVERGENCE,
  SLIP_BLOCK_BARRIER_UNDER_DIVERGENCE,
  SLIP_DIFFERENT_COLLECTIVES,
  SLIP_DIFFERENT_BARRIERS,
  SLIP_BARRIERS_ON_DIFFERENT_LINES,
  SLIP_COPY_WITHOUT_WAIT,
  SLIP_COPY_WITHOUT_COMMIT,
  SLIP_WRITE_UNDER_COPY,
  SLIP_MISALIGNED_COPY_TARGET,
  SLIP_MISALIGNED_COPY_SOURCE,
  SLIP_COPY_GLOBAL,  // from element 4 * t + m
  SLIP_OVERFLOW_OF_SUM,
  SLIP_INDEX_OF_LOCAL_ARRAY,  // element t % 4 + m of 4
  SLIP_SHIFT,                 // by m bits
  SLIP_HALVES_OF_A_WORD,      // written by two threads, which is not a race
  SLIP_RACE_ON_HALVES,
  SLIP_RACE_DESPITE_SHUFFLE,
  SLIP_RACE_BETWEEN_WARPS,
  SLIP_WRITE_AFTER_READ,
  SLIP_WRITE_AFTER_WRITE,
  SLIP_WRITE_AFTER_MATRIX_READ,
  SLIP_MISALIGNED_MATRIX_ROW,
  SLIP_BARRIER_AFTER_RETURN,
  SLIP_COLLECTIVE_OF_PART,
  SLIP_NULL_POINTER,
  SLIP_ENDLESS_WAIT,
};

PC_KERNEL(64, 1) void slips(const PcProbe params) {
  const Global<int> in(params.in);
  const Global<int> out(params.out);
  const Shared<int> shared = pc_shared_buffer().as<int>();
  const int t = pc_thread();
  const bool odd = t % 2 == 1;
  switch (params.n) {
    case SLIP_NONE: out.store(t, in.load(t)); break;
    case SLIP_READ_GLOBAL: out.store(t, in.load(t + params.m)); break;
    case SLIP_WRITE_GLOBAL: out.store(t + params.m, t); break;
    case SLIP_WRITE_SHARED: shared.store(t + params.m, t); break;
    case SLIP_READ_UNINITIALISED: out.store(t, shared.load(t)); break;
    case SLIP_MISALIGNED_GLOBAL_VECTOR: out.store_vector(t, pc_vector{}); break;
    case SLIP_MISALIGNED_SHARED_VECTOR: shared.store_vector(t, pc_vector{}); break;
    case SLIP_MISALIGNED_GLOBAL_READ: out.store(t, Global<int>(params.in + 2).load(t)); break;
    case SLIP_WARP_BARRIER_UNDER_DIVERGENCE:
      if (odd) pc_sync_warp();
      break;
    case SLIP_BLOCK_BARRIER_UNDER_DIVERGENCE:
      if (odd) pc_sync_block();
      break;
    case SLIP_DIFFERENT_COLLECTIVES:
      if (odd) {
        pc_sync_warp();
      } else {
        out.store(t, pc_shuffle(t, 0));
      }
      break;
    case SLIP_DIFFERENT_BARRIERS:
      if (odd) {
        pc_sync_block();
      } else {
        pc_sync_warp();
      }
      break;
    case SLIP_BARRIERS_ON_DIFFERENT_LINES:
      if (pc_warp() == 0) {
        pc_sync_block();
      } else {
        pc_sync_block();
      }
      break;
    case SLIP_COPY_WITHOUT_WAIT: pc_copy_async(shared.address(t * 4), in, t * 4, true); break;
    case SLIP_COPY_WITHOUT_COMMIT:
      pc_copy_async(shared.address(t * 4), in, t * 4, true);
      pc_wait_copies<0>();  // no group was committed
      break;
    case SLIP_WRITE_UNDER_COPY:
      pc_copy_async(shared.address(t * 4), in, t * 4, true);
      pc_commit_copies();
      shared.store(t * 4, 0);
      pc_wait_copies<0>();
      break;
    case SLIP_MISALIGNED_COPY_TARGET: pc_copy_async(shared.address(t * 4 + 1), in, t * 4, true); break;
    case SLIP_MISALIGNED_COPY_SOURCE: pc_copy_async(shared.address(t * 4), in, t * 4 + 1, true); break;
    case SLIP_COPY_GLOBAL:
      pc_copy_async(shared.address(t * 4), in, t * 4 + params.m, true);
      pc_commit_copies();
      pc_wait_copies<0>();
      break;
    case SLIP_OVERFLOW_OF_SUM: out.store(t, (t + 0x7fffffff) / 2); break;
    case SLIP_INDEX_OF_LOCAL_ARRAY: {
      int held[4] = {t, t, t, t};
      held[t % 4 + params.m] = 1;
      out.store(t, held[t % 2]);
      break;
    }
    case SLIP_SHIFT: out.store(t, in.load(t) << params.m); break;
    case SLIP_HALVES_OF_A_WORD:
      shared.as<pc_uint16>().store(t, static_cast<pc_uint16>(t));
      pc_sync_block();
      out.store(t, shared.as<pc_uint16>().load(63 - t));
      break;
    case SLIP_RACE_ON_HALVES:
      shared.as<pc_uint16>().store(t, static_cast<pc_uint16>(t));
      out.store(t, shared.load(t / 2));
      break;
    case SLIP_RACE_DESPITE_SHUFFLE:  // a shuffle does not order memory
      shared.store(t, t);
      pc_shuffle(t, 0);
      out.store(t, shared.load(t ^ 1));
      break;
    case SLIP_RACE_BETWEEN_WARPS:  // a barrier of the warp orders only its own lanes
      shared.store(t, t);
      pc_sync_warp();
      out.store(t, shared.load(t ^ 32));
      break;
    case SLIP_WRITE_AFTER_READ:
      shared.store(t, t);
      pc_sync_block();
      out.store(t, shared.load(t ^ 1));
      shared.store(t, 0);
      break;
    case SLIP_WRITE_AFTER_WRITE: shared.store(0, t); break;
    case SLIP_WRITE_AFTER_MATRIX_READ: {
      pc_uint32 r[4];
      for (int i = 0; i < 4; ++i) shared.store(t * 4 + i, t);
      pc_sync_warp();
      pc_load_matrices(r, shared.address(t * 4));
      shared.store(t * 4, 0);
      break;
    }
    case SLIP_MISALIGNED_MATRIX_ROW: {
      pc_uint32 r[4];
      for (int i = 0; i < 4; ++i) shared.store(t * 4 + i, t);
      pc_sync_block();
      pc_load_matrices(r, shared.address(t * 4 + (t == 37)));
      break;
    }
    case SLIP_BARRIER_AFTER_RETURN:
      if (t == 5) return;
      pc_sync_block();
      break;
    case SLIP_COLLECTIVE_OF_PART:
      pc_sync_block();
      if (t < 40) pc_ballot(true);
      break;
    case SLIP_NULL_POINTER: out.store(t, Global<int>(params.extra).load(t)); break;
    case SLIP_ENDLESS_WAIT:
      while (in.load(0) == 0) {
      }
      break;
    default: break;
  }
}

}  // namespace pagecore
