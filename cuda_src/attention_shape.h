// How the attention kernels are launched: read by the kernels and by whoever plans and launches them.
#pragma once

struct PcLaunchShape {
  int threads;        // of a CTA
  int shared_bytes;   // of a CTA; at most 99 KiB, what every architecture from 8.0 on gives
  int blocks_per_sm;  // CTAs that a multiprocessor is to hold, where its shared memory is that large
  int max_rows;       // packed rows of an item: query_count * heads of the CTA
  int tile_tokens;    // keys of one step of a CTA; shares that are multiples of it waste nothing
};

// A kernel's tiles go through rings of shared memory, one for each warp.
//
//   ring of a warp   [stages][key tile, value tile]
//   queries          [rows, dim], of an item
//   slots of a warp  [tokens of a tile]: where they lie in the cache, two 64-bit offsets each
//   walk of a warp   where its ring stands in the worker's items (tile_walk.cuh)
//   what rows attend [rows] (ScoreRow)
//   sums of a warp   [rows]: largest score and sum, at the end of an item
//   flag             one word, padded to 16 bytes
//
// At the end of an item a warp's own sums of values, float32 [rows, dim], lie where a tile has just been used up: a
// stage has exactly that size.
struct PcRingShape {
  int rows;
  int warps;
  int stages;
  int stage_bytes;
  int query_bytes;
  int tile_tokens;  // of a warp

  static constexpr int kSlotBytes = 16;
  static constexpr int kWalkBytes = 32;
  static constexpr int kScoreRowBytes = 24;

  constexpr int ring_bytes() const { return stages * stage_bytes; }
  constexpr int queries_begin() const { return warps * ring_bytes(); }
  constexpr int slots_begin() const { return queries_begin() + query_bytes; }
  constexpr int walks_begin() const { return slots_begin() + warps * tile_tokens * kSlotBytes; }
  constexpr int score_rows_begin() const { return walks_begin() + warps * kWalkBytes; }
  constexpr int sums_begin() const { return score_rows_begin() + rows * kScoreRowBytes; }
  constexpr int flag_begin() const { return sums_begin() + warps * rows * 8; }
  constexpr int bytes() const { return flag_begin() + 16; }
};

// decode.cu: head_dim 64, 128 or 256, 16-bit elements, tiles of 16 tokens. Rings are of 64 KiB.
constexpr PcRingShape pc_decode_ring(int head_dim) {
  return {16, head_dim <= 128 ? 4 : 2, head_dim <= 64 ? 4 : 2, 16 * head_dim * 2 * 2, 16 * head_dim * 2, 16};
}

constexpr PcLaunchShape pc_decode_shape(int head_dim) {
  const PcRingShape ring = pc_decode_ring(head_dim);
  return {ring.warps * 32, ring.bytes(), 2, ring.rows, ring.warps * ring.tile_tokens};
}

static_assert(pc_decode_shape(64).shared_bytes <= 99 * 1024, "every architecture gives 99 KiB");
static_assert(pc_decode_shape(128).shared_bytes <= 99 * 1024, "every architecture gives 99 KiB");
static_assert(pc_decode_shape(256).shared_bytes <= 99 * 1024, "every architecture gives 99 KiB");
