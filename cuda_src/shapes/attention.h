// Launch shapes of the attention kernels, for the kernels and for the code that plans and launches them.
#pragma once

// Dims of an instance of the matrix kernels (decode.cu, prefill.cu): of keys, and of values.
struct PcMatrixDims {
  int key;  // 0: no instance serves the call
  int value;
};

constexpr int pc_max_matrix_dim = 256;

// Returns the instance that serves a pair of dims. Rows must consist of whole 16-byte chunks. An instance computes with
// all of its dims, but reads and writes only those of the call: 80 dims in an instance of 96 cost 80 in memory traffic
// and 96 in arithmetic. There are few instances because each is compiled for two dtypes, two kinds of scores and every
// architecture. With 64, 96, 128, 192 and 256, padding takes at most 30 percent of the arithmetic for equal dims above
// 64: 17 percent for 80 and 160, 13 for 112. Keys of 192 with values of 128 (multi-head latent attention, uncompressed)
// have an instance of their own: O of 192 values would take 32 more registers of a lane for each 16 rows, and a warp of
// prefill could hold only 16 rows instead of 32.
constexpr PcMatrixDims pc_matrix_dims(int head_dim, int value_dim) {
  const int larger = head_dim > value_dim ? head_dim : value_dim, smaller = head_dim + value_dim - larger;
  if (smaller < 8 || larger > pc_max_matrix_dim || head_dim % 8 != 0 || value_dim % 8 != 0) return {0, 0};
  if (larger <= 64) return {64, 64};
  if (larger <= 96) return {96, 96};
  if (larger <= 128) return {128, 128};
  if (larger <= 192) return {192, value_dim <= 128 ? 128 : 192};
  return {256, 256};
}

// Bytes of a row of 16-bit elements in shared memory (TileRow of tiles.cuh).
constexpr int pc_row_bytes(int dim) { return (dim + 63) / 64 * 128; }

struct PcLaunchShape {
  int threads;        // of a CTA
  int shared_bytes;   // of a CTA; at most 99 KiB, which every architecture from 8.0 on provides
  int blocks_per_sm;  // resident CTAs of a multiprocessor, if its shared memory suffices
  int max_rows;       // packed rows of an item: query_count * heads of the CTA
  int tile_tokens;    // keys of one step of a CTA; shares should be multiples of it
};

// Resident CTAs of a multiprocessor with this much shared memory; each CTA takes 1 KiB more than it requests.
constexpr int pc_resident_ctas(PcLaunchShape shape, int shared_bytes_per_sm) {
  const int fit = shared_bytes_per_sm / (shape.shared_bytes + 1024);
  return fit < 1 ? 1 : fit < shape.blocks_per_sm ? fit : shape.blocks_per_sm;
}

// Shared memory of decode.cu and general.cu: a ring of tiles for each warp, and the state of a CTA.
//
//   ring of a warp     [stages][key tile, value tile]
//   queries            [query_bytes], of an item
//   slots of a warp    [tokens of a tile]: addresses of key and value, 64 bits each
//   walk of a warp     WalkState (tile_walk.cuh)
//   score rows         [score_rows]: ScoreRow
//   sums of a warp     [warp_rows]: largest score and sum, at the end of an item
//   weights of a warp  [weight_bytes]; over sealed blocks, a flag for each stage
//   folds              [2][fold_rows]: largest lse and sum of the pieces that have been folded
//   flag               one word, padded to 16 bytes
//
// At the end of an item, O of a warp, float32 [warp_rows, dim], overwrites the stage that was used last.
struct PcRingShape {
  int warps;
  int stages;
  int stage_bytes;
  int tile_tokens;  // of a warp
  int score_rows;   // packed rows that a CTA works on at a time
  int warp_rows;
  int query_bytes;
  int weight_bytes;
  int fold_rows;

  static constexpr int kSlotBytes = 16;
  static constexpr int kWalkBytes = 48;
  static constexpr int kScoreRowBytes = 24;

  constexpr int ring_bytes() const { return stages * stage_bytes; }
  constexpr int slot_bytes() const { return tile_tokens * kSlotBytes; }
  constexpr int queries_begin() const { return warps * ring_bytes(); }
  constexpr int slots_begin() const { return queries_begin() + query_bytes; }
  constexpr int walks_begin() const { return slots_begin() + warps * slot_bytes(); }
  constexpr int score_rows_begin() const { return walks_begin() + warps * kWalkBytes; }
  constexpr int sums_begin() const { return score_rows_begin() + (score_rows * kScoreRowBytes + 15) / 16 * 16; }
  constexpr int weights_begin() const { return sums_begin() + warps * warp_rows * 8; }
  constexpr int folds_begin() const { return weights_begin() + warps * weight_bytes; }
  constexpr int flag_begin() const { return folds_begin() + fold_rows * 2 * 8; }
  constexpr int bytes() const { return flag_begin() + 16; }
};

// decode.cu, by the dims of an instance: tiles of 16 tokens. The rings of a CTA take 64 KiB; 72 KiB for 192 dims, and
// 80 KiB for keys of 192 with values of 128.
constexpr PcRingShape pc_decode_ring(int key_dim, int value_dim) {
  const int stage_bytes = 16 * (pc_row_bytes(key_dim) + pc_row_bytes(value_dim));
  const int warps = stage_bytes <= 10 * 1024 ? 4 : 2;
  const int stages = stage_bytes <= 4 * 1024 ? 4 : stage_bytes == 12 * 1024 ? 3 : 2;
  return {warps, stages, stage_bytes, 16, 16, 16, 16 * pc_row_bytes(key_dim), 0, 0};
}

constexpr PcLaunchShape pc_decode_shape(int key_dim, int value_dim) {
  const PcRingShape ring = pc_decode_ring(key_dim, value_dim);
  return {ring.warps * 32, ring.bytes(), 2, ring.warp_rows, ring.warps * ring.tile_tokens};
}

// decode over sealed blocks: a flag for each stage, which is set if its tile is sealed.
constexpr PcRingShape pc_decode_sealed_ring(int key_dim, int value_dim) {
  PcRingShape ring = pc_decode_ring(key_dim, value_dim);
  ring.weight_bytes = 16;
  return ring;
}

constexpr PcLaunchShape pc_decode_sealed_shape(int key_dim, int value_dim) {
  PcLaunchShape shape = pc_decode_shape(key_dim, value_dim);
  shape.shared_bytes = pc_decode_sealed_ring(key_dim, value_dim).bytes();
  return shape;
}

// The shape of an instance with equal dims of keys and values.
constexpr PcLaunchShape pc_decode_shape(int dim) { return pc_decode_shape(dim, dim); }

// general.cu: head_dim and value_dim up to `dim`, which is 64, 128, 256 or 512; float32, tiles of 8 tokens, items of
// any number of rows. The rings of a CTA take 64 KiB, its queries 16 or 8.
constexpr PcRingShape pc_general_ring(int dim) {
  const int warps = dim <= 128 ? 4 : dim <= 256 ? 2 : 1;
  const int warp_rows = dim <= 64 ? 16 : dim <= 256 ? 8 : 4;
  const int rows = warps * warp_rows;
  return {warps, dim <= 64 ? 4 : 2, 8 * dim * 4 * 2, 8, rows, warp_rows, rows * dim * 4, warp_rows * 8 * 4, rows};
}

constexpr int pc_max_general_dim = 512;

constexpr PcLaunchShape pc_general_shape(int dim) {
  const PcRingShape ring = pc_general_ring(dim);
  return {ring.warps * 32, ring.bytes(), 2, 0x7fffffff, ring.warps * ring.tile_tokens};
}

constexpr bool pc_decode_fits(int key_dim, int value_dim) {
  return pc_decode_sealed_shape(key_dim, value_dim).shared_bytes <= 99 * 1024;
}

static_assert(pc_decode_fits(64, 64) && pc_decode_fits(96, 96) && pc_decode_fits(128, 128),
              "every architecture provides 99 KiB");
static_assert(pc_decode_fits(192, 128) && pc_decode_fits(192, 192) && pc_decode_fits(256, 256),
              "every architecture provides 99 KiB");
static_assert(pc_general_shape(128).shared_bytes <= 99 * 1024, "every architecture provides 99 KiB");
static_assert(pc_general_shape(512).shared_bytes <= 99 * 1024, "every architecture provides 99 KiB");
