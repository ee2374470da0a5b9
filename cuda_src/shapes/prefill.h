// Launch shape of prefill.cu, for the kernel and for the code that launches it.
#pragma once

#include "cuda_src/shapes/attention.h"

// Shared memory of prefill.cu:
//
//   queries  [rows, key_dim], of an item; at its end the output is packed here
//   keys     [tokens, key_dim], of a tile
//   values   [tokens, value_dim]; over codes they are unpacked in the place of the keys
//   codes    [2][tokens, code_bytes], of keys and of values
//   scales   [2][tokens, scale_bytes]: of groups, or of a row, followed by the factor of its column
//   sealed   words and scales of the tile's tokens in sealed blocks, of keys or of values, which are unpacked to their
//            rows above (attention/prefill/sealed.cuh); one of the two at a time. Above 192 dims they have no memory of
//            their own, but begin where their rows do
//   slots    [2][tokens]: 64-bit offsets of keys and of values in the cache; keys are one tile ahead of values. Over
//            codes [tokens]: Slot. With sealed blocks [2][tokens]: Slot
//   ranges   [rows]: KeyRange of a row
//   sums     [rows]: largest lse and sum of the pieces that have been folded
//   words    [8]: one for each warp
//   item     ItemSpan (attention/prefill/feed.cuh)
//   spans    [warps]: WarpSpan (attention/prefill/rows.cuh)
//   tables   BlockTables of the item's sequence, with sealed blocks
struct PcPrefillShape {
  int key_dim;  // of the instance
  int value_dim;
  int warps;
  int row_tiles;  // of a warp, 16 rows each
  int tokens;     // of a tile
  int blocks_per_sm;
  int code_bits;  // 8 or 4; 0: a 16-bit cache
  bool sealed;    // the first tokens of sequences are in sealed blocks

  constexpr int rows() const { return warps * row_tiles * 16; }
  constexpr int keys_begin() const { return rows() * pc_row_bytes(key_dim); }
  constexpr int tile_bytes() const { return tokens * pc_row_bytes(key_dim); }
  constexpr int values_begin() const { return keys_begin() + (code_bits == 0 ? tile_bytes() : 0); }
  constexpr int code_bytes() const { return key_dim * code_bits / 8; }  // of a row
  constexpr int scale_bytes() const {
    const int group_bytes = code_bits == 8 ? key_dim / 32 : key_dim / 16;
    return code_bits == 0 ? 0 : group_bytes < 8 ? 8 : group_bytes;
  }
  constexpr int codes_begin() const { return values_begin() + tokens * pc_row_bytes(value_dim); }
  constexpr int scales_begin() const { return codes_begin() + 2 * tokens * code_bytes(); }
  constexpr int sealed_begin() const { return scales_begin() + 2 * tokens * scale_bytes(); }
  constexpr bool unpacks_in_place() const { return sealed && key_dim > 192; }
  // For each dim of 16 tokens: words of up to 4 bits a code, 8 bytes; a scale and a least number of up to 4 bytes each.
  constexpr int sealed_bytes() const { return sealed && !unpacks_in_place() ? tokens * key_dim : 0; }
  constexpr int slots_begin() const { return sealed_begin() + sealed_bytes(); }
  constexpr int ranges_begin() const { return slots_begin() + (code_bits == 0 ? 2 : 1) * tokens * 8; }
  constexpr int sums_begin() const { return ranges_begin() + rows() * 8; }
  constexpr int words_begin() const { return sums_begin() + rows() * 8; }
  constexpr int item_begin() const { return words_begin() + 32; }
  constexpr int spans_begin() const { return item_begin() + 32; }
  constexpr int tables_begin() const { return spans_begin() + warps * 16; }
  constexpr int bytes() const { return tables_begin() + (sealed ? 16 : 0); }
};

constexpr PcPrefillShape pc_prefill_tiles(int key_dim, int value_dim, bool full, int code_bits = 0,
                                          bool sealed = false) {
  // Keys of 192 dims, their words and values of 128 exceed 99 KiB for 64 tokens.
  const int tokens = value_dim > 128 || (sealed && key_dim > 128) ? 32 : 64;
  // With 32 rows a warp uses each fragment of keys and values twice, if the registers suffice.
  if (value_dim <= 128 && !full) return {key_dim, value_dim, 4, 2, tokens, 2, code_bits, sealed};
  return {key_dim, value_dim, 8, 1, tokens, 1, code_bits, sealed};
}

constexpr PcLaunchShape pc_launch_shape(const PcPrefillShape& tiles) {
  return {tiles.warps * 32, tiles.bytes(), tiles.blocks_per_sm, tiles.rows(), tiles.tokens};
}

constexpr PcLaunchShape pc_prefill_shape(int key_dim, int value_dim, bool full) {
  return pc_launch_shape(pc_prefill_tiles(key_dim, value_dim, full));
}

// The shape of prefill_stored.
constexpr PcLaunchShape pc_prefill_stored_shape(int code_bits, int dim, bool full) {
  return pc_launch_shape(pc_prefill_tiles(dim, dim, full, code_bits));
}

// The shape of prefill_sealed.
constexpr PcLaunchShape pc_prefill_sealed_shape(int key_dim, int value_dim, bool full) {
  return pc_launch_shape(pc_prefill_tiles(key_dim, value_dim, full, 0, true));
}

// The shape of an instance with equal dims of keys and values.
constexpr PcLaunchShape pc_prefill_shape(int dim, bool full) { return pc_prefill_shape(dim, dim, full); }

constexpr bool pc_prefill_fits(int key_dim, int value_dim) {
  return pc_prefill_shape(key_dim, value_dim, false).shared_bytes <= 99 * 1024 &&
         pc_prefill_shape(key_dim, value_dim, true).shared_bytes <= 99 * 1024;
}

constexpr bool pc_prefill_sealed_fits(int key_dim, int value_dim) {
  return pc_prefill_sealed_shape(key_dim, value_dim, false).shared_bytes <= 99 * 1024 &&
         pc_prefill_sealed_shape(key_dim, value_dim, true).shared_bytes <= 99 * 1024;
}

constexpr bool pc_prefill_stored_fits(int dim) {
  return pc_prefill_stored_shape(8, dim, false).shared_bytes <= 99 * 1024 &&
         pc_prefill_stored_shape(8, dim, true).shared_bytes <= 99 * 1024 &&
         pc_prefill_stored_shape(4, dim, false).shared_bytes <= 99 * 1024 &&
         pc_prefill_stored_shape(4, dim, true).shared_bytes <= 99 * 1024;
}

static_assert(pc_prefill_stored_fits(64) && pc_prefill_stored_fits(128) && pc_prefill_stored_fits(256),
              "every architecture provides 99 KiB");
static_assert(pc_prefill_sealed_fits(64, 64) && pc_prefill_sealed_fits(96, 96) && pc_prefill_sealed_fits(128, 128),
              "every architecture provides 99 KiB");
static_assert(pc_prefill_sealed_fits(192, 128) && pc_prefill_sealed_fits(192, 192) && pc_prefill_sealed_fits(256, 256),
              "every architecture provides 99 KiB");
static_assert(pc_prefill_fits(64, 64) && pc_prefill_fits(96, 96) && pc_prefill_fits(128, 128),
              "every architecture provides 99 KiB");
static_assert(pc_prefill_fits(192, 128) && pc_prefill_fits(192, 192) && pc_prefill_fits(256, 256),
              "every architecture provides 99 KiB");
