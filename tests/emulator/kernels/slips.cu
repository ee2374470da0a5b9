// Faults that need no more than a line: `n` says which.
#include "probe.h"

namespace pagecore {

PC_KERNEL(64, 1) void slips(const PcProbe params) {
  const Global<int> in(params.in);
  const Global<int> out(params.out);
  const Shared<int> shared = pc_shared_buffer().as<int>();
  const int t = pc_thread();
  const bool odd = t % 2 == 1;
  switch (params.n) {
    case 0: out.store(t, in.load(t)); break;
    case 1: out.store(t, in.load(t + params.m)); break;
    case 2: out.store(t + params.m, t); break;
    case 3: shared.store(t + params.m, t); break;
    case 4: out.store(t, shared.load(t)); break;
    case 5: out.store_vector(t, pc_vector{}); break;
    case 6: shared.store_vector(t, pc_vector{}); break;
    case 7: out.store(t, Global<int>(params.in + 2).load(t)); break;
    case 8:
      if (odd) pc_sync_warp();
      break;
    case 9:
      if (odd) pc_sync_block();
      break;
    case 10:
      if (odd) {
        pc_sync_warp();
      } else {
        out.store(t, pc_shuffle(t, 0));
      }
      break;
    case 11:
      if (odd) {
        pc_sync_block();
      } else {
        pc_sync_warp();
      }
      break;
    case 12:
      if (pc_warp() == 0) {
        pc_sync_block();
      } else {
        pc_sync_block();
      }
      break;
    case 13: pc_copy_async(shared.address(t * 4), in, t * 4, true); break;
    case 14:
      pc_copy_async(shared.address(t * 4), in, t * 4, true);
      pc_wait_copies<0>();  // nothing was committed
      break;
    case 15:
      pc_copy_async(shared.address(t * 4), in, t * 4, true);
      pc_commit_copies();
      shared.store(t * 4, 0);
      pc_wait_copies<0>();
      break;
    case 16: pc_copy_async(shared.address(t * 4 + 1), in, t * 4, true); break;
    case 17: pc_copy_async(shared.address(t * 4), in, t * 4 + 1, true); break;
    case 18:
      pc_copy_async(shared.address(t * 4), in, t * 4 + params.m, true);
      pc_commit_copies();
      pc_wait_copies<0>();
      break;
    case 19: out.store(t, (t + 0x7fffffff) / 2); break;
    case 20: {
      int held[4] = {t, t, t, t};
      held[t % 4 + params.m] = 1;
      out.store(t, held[t % 2]);
      break;
    }
    case 21: out.store(t, in.load(t) << params.m); break;
    case 22:  // halves of one word by two threads, which is no race
      shared.as<pc_uint16>().store(t, static_cast<pc_uint16>(t));
      pc_sync_block();
      out.store(t, shared.as<pc_uint16>().load(63 - t));
      break;
    case 23:  // and this one is
      shared.as<pc_uint16>().store(t, static_cast<pc_uint16>(t));
      out.store(t, shared.load(t / 2));
      break;
    case 24:  // a shuffle orders no memory
      shared.store(t, t);
      pc_shuffle(t, 0);
      out.store(t, shared.load(t ^ 1));
      break;
    case 25:  // a barrier of the warp orders its own lanes alone
      shared.store(t, t);
      pc_sync_warp();
      out.store(t, shared.load(t ^ 32));
      break;
    case 26:  // a write behind another's read
      shared.store(t, t);
      pc_sync_block();
      out.store(t, shared.load(t ^ 1));
      shared.store(t, 0);
      break;
    case 27: shared.store(0, t); break;
    case 28: {  // a read by ldmatrix and a write behind it
      pc_uint32 r[4];
      for (int i = 0; i < 4; ++i) shared.store(t * 4 + i, t);
      pc_sync_warp();
      pc_load_matrices(r, shared.address(t * 4));
      shared.store(t * 4, 0);
      break;
    }
    case 29: {
      pc_uint32 r[4];
      for (int i = 0; i < 4; ++i) shared.store(t * 4 + i, t);
      pc_sync_block();
      pc_load_matrices(r, shared.address(t * 4 + (t == 37)));
      break;
    }
    case 30:
      if (t == 5) return;
      pc_sync_block();
      break;
    case 31:
      pc_sync_block();
      if (t < 40) pc_ballot(true);
      break;
    case 32: out.store(t, Global<int>(params.extra).load(t)); break;
    case 33:
      while (in.load(0) == 0) {
      }
      break;
    default: break;
  }
}

}  // namespace pagecore
