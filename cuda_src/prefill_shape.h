// How the kernel of prompts is launched: read by the kernel and by whoever launches it.
#pragma once

#include "attention_shape.h"

// Shared memory of prefill.cu:
//
//   queries  [rows, head_dim], of an item; at its end the output is gathered here
//   keys     [tokens, head_dim], of a tile
//   values   [tokens, head_dim]
//   slots    [2][tokens]: where keys and values lie in the cache, 64-bit offsets; keys are a tile ahead of values
//   ranges   [rows]: the first key that a row attends to and the one behind the last
//   sums     [rows]: largest lse and sum of the pieces that have been folded
//   words    [8]: what warps tell each other
//   item     which it is, where its blocks are listed, and the keys that all of its queries attend to
//   spans    [warps]: the keys that one of a warp's rows attends to, and those that all do
struct PcPrefillShape {
  int head_dim;
  int warps;
  int row_tiles;  // of 16 rows, for each warp
  int tokens;     // of a tile
  int blocks_per_sm;

  constexpr int rows() const { return warps * row_tiles * 16; }
  constexpr int row_bytes() const { return head_dim * 2; }
  constexpr int keys_begin() const { return rows() * row_bytes(); }
  constexpr int values_begin() const { return keys_begin() + tokens * row_bytes(); }
  constexpr int slots_begin() const { return values_begin() + tokens * row_bytes(); }
  constexpr int ranges_begin() const { return slots_begin() + 2 * tokens * 8; }
  constexpr int sums_begin() const { return ranges_begin() + rows() * 8; }
  constexpr int words_begin() const { return sums_begin() + rows() * 8; }
  constexpr int item_begin() const { return words_begin() + 32; }
  constexpr int spans_begin() const { return item_begin() + 32; }
  constexpr int bytes() const { return spans_begin() + warps * 16; }
};

constexpr PcPrefillShape pc_prefill_tiles(int head_dim, bool full) {
  // 32 rows of a warp use each key and value that it loads twice as often as 16, where the registers hold them.
  if (head_dim <= 128 && !full) return {head_dim, 4, 2, 64, 2};
  if (head_dim <= 128) return {head_dim, 8, 1, 64, 1};
  return {head_dim, 8, 1, 32, 1};
}

constexpr PcLaunchShape pc_prefill_shape(int head_dim, bool full) {
  const PcPrefillShape tiles = pc_prefill_tiles(head_dim, full);
  return {tiles.warps * 32, tiles.bytes(), tiles.blocks_per_sm, tiles.rows(), tiles.tokens};
}

static_assert(pc_prefill_shape(64, false).shared_bytes <= 99 * 1024, "every architecture gives 99 KiB");
static_assert(pc_prefill_shape(128, false).shared_bytes <= 99 * 1024, "every architecture gives 99 KiB");
static_assert(pc_prefill_shape(256, true).shared_bytes <= 99 * 1024, "every architecture gives 99 KiB");
