// Tiles of 64 keys: their order, their offsets in the cache, and the rows that attend to them.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The order in which a tile's tokens are visited: the token at each index.
//
//   natural            0  1  2  3  4  5  6  7  8 ...
//   streams of one     0 16 32 48  1 17 33 49  2 ...
//   streams of two     0  1 16 17 32 33 48 49  2 ...
//
// Streams alternate between the four quarters of the tile (four blocks if the block size is 16), so that the hardware
// prefetcher runs ahead in all of them. Turns of 512 bytes suit it best.
struct Order {
  int32_t token[kTileTokens];
};

constexpr int kStreams = 4;

constexpr Order make_order(int streams, int turn) {
  Order order{};
  const int each = static_cast<int>(kTileTokens) / streams;
  for (int place = 0; place < kTileTokens; ++place) {
    const int round = place / (streams * turn), stream = place / turn % streams;
    order.token[place] = stream * each + round * turn + place % turn;
  }
  return order;
}

constexpr Order kNatural = make_order(1, 1), kStreamsOfOne = make_order(kStreams, 1),
                kStreamsOfTwo = make_order(kStreams, 2);

PC_FORCE_INLINE const Order& streams_for(int64_t row_bytes) { return row_bytes <= 256 ? kStreamsOfTwo : kStreamsOfOne; }

// Offsets of the rows of a tile, of their codes and of their scales. Plain rows have no scales.
struct RowOffsets {
  int64_t codes[kTileTokens];
  int64_t scales[kTileTokens];
};

// One tile of keys: positions start .. start + 64, of which the item covers [first, last). Offsets are relative to a
// head's first byte and indexed by the order.
struct Tile {
  int64_t start;
  int first;
  int last;
  const Order* order;
  bool has_scales;  // of keys or of values
  RowOffsets keys;
  RowOffsets values;
};

// Tokens of a tile, in natural order, that some row attends to: [first, last), filtered by `used`. Other tokens must
// not be read.
struct TileUse {
  int first;
  int last;
  const uint8_t* used;  // [64]; null: all
};

// The query rows of one key head.
struct HeadRows {
  int64_t first;  // index among the rows of the head
  int64_t count;
  const int32_t* low;  // [rows]; row r attends to keys [low[r], high[r]) of the tile
  const int32_t* high;
  const float* query;           // [rows, query_stride]; or
  const uint16_t* query_pairs;  // [rows, query_stride], bfloat16
  int64_t query_stride;
  float* scores;      // [rows, 64]; overwritten by the weights
  uint16_t* weights;  // [rows, 64], bfloat16
  float* acc;         // [rows, acc_stride]
  int64_t acc_stride;
  const float* factor;  // [rows]; rescales the old acc
};

PC_FORCE_INLINE void copy_place(Tile& tile, int from, int to) {
  tile.keys.codes[to] = tile.keys.codes[from];
  tile.values.codes[to] = tile.values.codes[from];
  if (!tile.has_scales) return;
  tile.keys.scales[to] = tile.keys.scales[from];
  tile.values.scales[to] = tile.values.scales[from];
}

PC_FORCE_INLINE void reorder(int64_t (&offsets)[kTileTokens], const Order& from, const Order& to) {
  int64_t natural[kTileTokens];
  for (int place = 0; place < kTileTokens; ++place) natural[from.token[place]] = offsets[place];
  for (int place = 0; place < kTileTokens; ++place) offsets[place] = natural[to.token[place]];
}

PC_FORCE_INLINE void set_order(Tile& tile, const Order& order) {
  if (tile.order == &order) return;
  reorder(tile.keys.codes, *tile.order, order);
  reorder(tile.values.codes, *tile.order, order);
  if (tile.has_scales) {
    reorder(tile.keys.scales, *tile.order, order);
    reorder(tile.values.scales, *tile.order, order);
  }
  tile.order = &order;
}

// Locates the tile of `position`, in natural order. Indices outside [first, last) repeat the nearest index inside.
inline void locate(const AttentionArgs& args, const Indices& blocks, const PcWorkItem& item, int64_t position,
                   Tile& tile) {
  const Cache& key = args.key;
  const Cache& value = args.value;
  tile.start = position / kTileTokens * kTileTokens;
  tile.order = &kNatural;
  tile.has_scales = key.scales.data != nullptr || value.scales.data != nullptr;
  const int64_t end = tile.start + kTileTokens;
  tile.first = static_cast<int>(item.key_begin > tile.start ? item.key_begin - tile.start : 0);
  tile.last = static_cast<int>((item.key_end < end ? item.key_end : end) - tile.start);
  int64_t block = (tile.start + tile.first) / key.block_size;
  int64_t within = tile.start + tile.first - block * key.block_size;
  for (int t = tile.first; t < tile.last; ++block, within = 0) {
    // With a mask, the id of a block that no row attends to may be arbitrary; the block is not read.
    const int64_t named = blocks.at(block);
    const int64_t id = named >= 0 && named < key.num_blocks && named < value.num_blocks ? named : 0;
    int64_t key_offset = id * key.block_stride + within * key.token_stride;
    int64_t value_offset = id * value.block_stride + within * value.token_stride;
    int64_t key_scale = id * key.scales.block_stride + within * key.scales.token_stride;
    int64_t value_scale = id * value.scales.block_stride + within * value.scales.token_stride;
    for (; t < tile.last && within < key.block_size; ++t, ++within) {
      tile.keys.codes[t] = key_offset;
      tile.values.codes[t] = value_offset;
      key_offset += key.token_stride;
      value_offset += value.token_stride;
      if (!tile.has_scales) continue;
      tile.keys.scales[t] = key_scale;
      tile.values.scales[t] = value_scale;
      key_scale += key.scales.token_stride;
      value_scale += value.scales.token_stride;
    }
  }
  for (int t = 0; t < tile.first; ++t) copy_place(tile, tile.first, t);
  for (int t = tile.last; t < kTileTokens; ++t) copy_place(tile, tile.last - 1, t);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
