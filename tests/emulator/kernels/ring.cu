// A small kernel that does what the real ones do, so that a fault planted in it is one of theirs:
//
//   out[16 x 16] = Q[16 x 64] * (sum of n tiles K[16 x 64]) transposed
//
// Warp w has the tiles w, w + 4 ... A warp keeps two tiles of its own in shared memory: while it multiplies one, the
// next one is on its way. Rows of 128 bytes are swizzled: chunk c of row r lies at c ^ (r % 8), so that ldmatrix meets
// each bank once. Every element is read once. At the end each warp leaves its sums in the buffer, and warp 0 adds them.
#include "probe.h"

namespace pagecore {

constexpr int kWarps = 4;
constexpr int kRowBytes = 128;
constexpr int kTileBytes = 16 * kRowBytes;
constexpr int kStages = 2;

PC_DEVICE int chunk_at(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row % 8)) << 4); }

template <typename T>
PC_DEVICE void fetch(SharedAddress stage, const Global<T>& tiles, int tile, int num_tiles) {
  PC_UNROLL for (int j = 0; j < 4; ++j) {
    const int row = j * 4 + pc_lane() / 8;
    const int chunk = pc_lane() % 8;
    const pc_int64 from = (static_cast<pc_int64>(tile) * 16 + row) * 64 + chunk * 8;
    pc_copy_async(stage + chunk_at(row, chunk), tiles, from, tile < num_tiles);
  }
  pc_commit_copies();
}

template <typename T>
PC_KERNEL(kWarps * 32, 1)
void ring(const PcProbe params) {
  const Global<T> tiles(params.in);
  const Global<T> query(params.extra);
  const int lane = pc_lane();
  const int warp = pc_warp();
  const Shared<pc_uint8> own = pc_shared_buffer() + warp * kStages * kTileBytes;

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
    pc_wait_copies<1>();
    pc_sync_warp();
    const SharedAddress stage = own.address(round % kStages * kTileBytes);
    PC_UNROLL for (int k = 0; k < 4; ++k) {
      pc_uint32 b[4];
      pc_load_matrices(b, stage + chunk_at(lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
      pc_multiply<T>(c[0], a[k], b[0], b[1]);
      pc_multiply<T>(c[1], a[k], b[2], b[3]);
    }
    pc_sync_warp();  // before the stage is filled again
  }
  pc_wait_copies<0>();
  pc_sync_block();

  const Shared<float> sums = pc_shared_buffer().as<float>();
  PC_UNROLL for (int j = 0; j < 2; ++j) {
    PC_UNROLL for (int i = 0; i < 4; ++i) {
      sums.store(((warp * 16 + lane / 4 + i / 2 * 8) * 16) + j * 8 + lane % 4 * 2 + i % 2, c[j][i]);
    }
  }
  pc_sync_block();
  if (warp == 0) {
    for (int i = lane; i < 256; i += 32) {
      float sum = 0.0f;
      for (int w = 0; w < kWarps; ++w) sum += sums.load(w * 256 + i);
      Global<float>(params.out).store(i, sum);
    }
  }
}

}  // namespace pagecore
