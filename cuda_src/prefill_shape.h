// Launch shape of prefill.cu, for the kernel and for the code that launches it.
#pragma once

#include "attention_shape.h"

// Shared memory of prefill.cu:
//
//   queries  [rows, key_dim], of an item; at its end the output is packed here
//   keys     [tokens, key_dim], of a tile
//   values   [tokens, value_dim]
//   slots    [2][tokens]: 64-bit offsets of keys and of values in the cache; keys are one tile ahead of values
//   ranges   [rows]: KeyRange of a row
//   sums     [rows]: largest lse and sum of the pieces that have been folded
//   words    [8]: one for each warp
//   item     ItemSpan (prefill_feed.cuh)
//   spans    [warps]: WarpSpan (prefill_rows.cuh)
struct PcPrefillShape {
  int key_dim;  // of the instance
  int value_dim;
  int warps;
  int row_tiles;  // of a warp, 16 rows each
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
  // With 32 rows a warp uses each fragment of keys and values twice, if the registers suffice.
  if (value_dim <= 128 && !full) return {key_dim, value_dim, 4, 2, 64, 2};
  if (value_dim <= 128) return {key_dim, value_dim, 8, 1, 64, 1};
  return {key_dim, value_dim, 8, 1, 32, 1};
}

constexpr PcLaunchShape pc_prefill_shape(int key_dim, int value_dim, bool full) {
  const PcPrefillShape tiles = pc_prefill_tiles(key_dim, value_dim, full);
  return {tiles.warps * 32, tiles.bytes(), tiles.blocks_per_sm, tiles.rows(), tiles.tokens};
}

// The shape of an instance with equal dims of keys and values.
constexpr PcLaunchShape pc_prefill_shape(int dim, bool full) { return pc_prefill_shape(dim, dim, full); }

constexpr bool pc_prefill_fits(int key_dim, int value_dim) {
  return pc_prefill_shape(key_dim, value_dim, false).shared_bytes <= 99 * 1024 &&
         pc_prefill_shape(key_dim, value_dim, true).shared_bytes <= 99 * 1024;
}

static_assert(pc_prefill_fits(64, 64) && pc_prefill_fits(96, 96) && pc_prefill_fits(128, 128),
              "every architecture provides 99 KiB");
static_assert(pc_prefill_fits(192, 128) && pc_prefill_fits(192, 192) && pc_prefill_fits(256, 256),
              "every architecture provides 99 KiB");
