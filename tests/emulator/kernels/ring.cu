// A small kernel with the techniques of the real ones, so that a fault planted in it is a fault of theirs:
//
//   out[16 x 16] = Q[16 x 64] * (sum of n tiles K[16 x 64]) transposed
//
// Warp w processes the tiles w, w + 4 ... A warp keeps two tiles of its own in shared memory: while it multiplies one,
// the next one is being copied. Rows of 128 bytes are swizzled: chunk c of row r is stored at c ^ (r % 8), so that
// ldmatrix uses each bank once. Every element is read once. At the end each warp stores its sums in the buffer, and
// warp 0 adds them.
#include "probe.h"

namespace pagecore {

constexpr int kWarps = 4;
constexpr int kRowBytes = 128;
constexpr int kTileBytes = 16 * kRowBytes;
constexpr int kStages = 2;  // fault: stages

PC_DEVICE int chunk_at(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row % 8)) << 4);  // fault: swizzle
}

template <typename T>
PC_DEVICE void fetch(SharedAddress stage, const Global<T>& tiles, int tile, int num_tiles) {
  PC_UNROLL for (int j = 0; j < 4; ++j) {
    const int row = j * 4 + pc_lane() / 8;
    const int chunk = pc_lane() % 8;
    const pc_int64 from = (static_cast<pc_int64>(tile) * 16 + row) * 64 + chunk * 8;  // fault: source_of_copy
    const SharedAddress to = stage + chunk_at(row, chunk);                            // fault: target_of_copy
    pc_copy_async(to, tiles, from, tile < num_tiles);                                 // fault: copy
  }
  pc_commit_copies();  // fault: commit
}

template <typename T>
PC_KERNEL(kWarps * 32, 1)
void ring(const PcProbe params) {
  const Global<T> tiles(params.in);
  const Global<T> query(params.extra);
  const int lane = pc_lane();
  const int warp = pc_warp();
  const Shared<pc_uint8> own = pc_shared_buffer() + warp * kStages * kTileBytes;  // fault: ring_of_warp

  pc_uint32 a[4][4];
  PC_UNROLL for (int k = 0; k < 4; ++k) {
    PC_UNROLL for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i % 2 * 8;
      const int column = k * 16 + lane % 4 * 2 + i / 2 * 8;
      a[k][i] = query.template as<pc_uint32>().load((row * 64 + column) / 2);
    }
  }

  float c[2][4] = {};
  const int rounds = (params.n + kWarps - 1) / kWarps;
  fetch(own.address(0), tiles, warp, params.n);
  for (int round = 0; round < rounds; ++round) {
    fetch(own.address((round + 1) % kStages * kTileBytes), tiles, warp + (round + 1) * kWarps, params.n);
    pc_wait_copies<1>();  // fault: wait
    pc_sync_warp();       // fault: barrier_after_wait
    const SharedAddress stage = own.address(round % kStages * kTileBytes);
    PC_UNROLL for (int k = 0; k < 4; ++k) {
      pc_uint32 b[4];                                                          // fault: start_of_step
      const int row = lane % 8 + lane / 16 * 8, chunk = k * 2 + lane / 8 % 2;  // fault: order_of_matrices
      pc_load_matrices(b, stage + chunk_at(row, chunk));
      pc_multiply<T>(c[0], a[k], b[0], b[1]);
      pc_multiply<T>(c[1], a[k], b[2], b[3]);  // fault: second_product
    }
    pc_sync_warp();  // fault: barrier_before_refill
  }
  pc_wait_copies<0>();  // fault: last_wait
  pc_sync_block();      // fault: barrier_before_sums

  const Shared<float> sums = pc_shared_buffer().as<float>();
  PC_UNROLL for (int j = 0; j < 2; ++j) {
    PC_UNROLL for (int i = 0; i < 4; ++i) {
      const float sum = c[j][i];  // fault: stored_sum
      sums.store(((warp * 16 + lane / 4 + i / 2 * 8) * 16) + j * 8 + lane % 4 * 2 + i % 2, sum);
    }
  }
  pc_sync_block();  // fault: barrier_after_sums
  if (warp == 0) {
    for (int i = lane; i < 256; i += 32) {
      float sum = 0.0f;
      for (int w = 0; w < kWarps; ++w) sum += sums.load(w * 256 + i);  // fault: added_sums
      Global<float>(params.out).store(i, sum);
    }
  }
}

}  // namespace pagecore
