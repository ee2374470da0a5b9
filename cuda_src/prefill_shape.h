// Launch shape of the kernel of prompts: read by the kernel, and by the code that launches it.
#pragma once

#include "attention_shape.h"

// Shared memory of prefill.cu:
//
//   queries  [rows, key_dim], of an item; at its end the output is gathered here
//   keys     [tokens, key_dim], of a tile
//   values   [tokens, value_dim]
//   slots    [2][tokens]: where keys and values lie in the cache, 64-bit offsets; keys are a tile ahead of values
//   ranges   [rows]: the first key that a row attends to and the one behind the last
//   sums     [rows]: largest lse and sum of the pieces that have been folded
//   words    [8]: one for each warp
//   item     which it is, where its blocks are listed, and the keys that all of its queries attend to
//   spans    [warps]: the keys that one of a warp's rows attends to, and those that all do
struct PcPrefillShape {
  int key_dim;  // of the instance
  int value_dim;
  int warps;
  int row_tiles;  // of 16 rows, for each warp
  int tokens;     // of a tile
  int blocks_per_sm;

  constexpr int rows() const { return warps * row_tiles * 16; }
  constexpr int keys_begin() const { return rows() * pc_row_bytes(key_dim); }
  constexpr int values_begin() const { return keys_begin() + tokens * pc_row_bytes(key_dim); }
  constexpr int slots_begin() const { return values_begin() + tokens * pc_row_bytes(value_dim); }
  constexpr int ranges_begin() const { return slots_begin() + 2 * tokens * 8; }
  constexpr int sums_begin() const { return ranges_begin() + rows() * 8; }
  constexpr int words_begin() const { return sums_begin() + rows() * 8; }
  constexpr int item_begin() const { return words_begin() + 32; }
  constexpr int spans_begin() const { return item_begin() + 32; }
  constexpr int bytes() const { return spans_begin() + warps * 16; }
};

constexpr PcPrefillShape pc_prefill_tiles(int key_dim, int value_dim, bool full) {
  // 32 rows of a warp use each key and value that it loads twice as often as 16, where the registers hold them.
  if (value_dim <= 128 && !full) return {key_dim, value_dim, 4, 2, 64, 2};
  if (value_dim <= 128) return {key_dim, value_dim, 8, 1, 64, 1};
  return {key_dim, value_dim, 8, 1, 32, 1};
}

constexpr PcLaunchShape pc_prefill_shape(int key_dim, int value_dim, bool full) {
  const PcPrefillShape tiles = pc_prefill_tiles(key_dim, value_dim, full);
  return {tiles.warps * 32, tiles.bytes(), tiles.blocks_per_sm, tiles.rows(), tiles.tokens};
}

// Of an instance for values of as many dims as keys.
constexpr PcLaunchShape pc_prefill_shape(int dim, bool full) { return pc_prefill_shape(dim, dim, full); }

constexpr bool pc_prefill_fits(int key_dim, int value_dim) {
  return pc_prefill_shape(key_dim, value_dim, false).shared_bytes <= 99 * 1024 &&
         pc_prefill_shape(key_dim, value_dim, true).shared_bytes <= 99 * 1024;
}

static_assert(pc_prefill_fits(64, 64) && pc_prefill_fits(96, 96) && pc_prefill_fits(128, 128), "99 KiB everywhere");
static_assert(pc_prefill_fits(192, 128) && pc_prefill_fits(192, 192) && pc_prefill_fits(256, 256), "99 KiB everywhere");
