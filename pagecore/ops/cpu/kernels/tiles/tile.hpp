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

// The order for rows of `row_bytes`, by pages if `by_pages`.
PC_FORCE_INLINE const Order& order_for(int64_t row_bytes, bool by_pages) {
  if (by_pages && row_bytes >= 256) return kNatural;
  return row_bytes <= 256 ? kStreamsOfTwo : kStreamsOfOne;
}

// Offsets of the rows of a tile, of their codes and of their scales. Plain rows have no scales. The first `num_sealed`
// tokens are in sealed blocks: their entries in `codes` are slots, block * block_size + offset.
struct RowOffsets {
  int64_t codes[kTileTokens];
  int64_t scales[kTileTokens];
  int num_sealed;
};

// The blocks of a sequence. Sealed blocks have its first `sealed_len` tokens.
struct SequenceBlocks {
  Indices blocks;
  Indices sealed;
  int64_t sealed_len = 0;

  PC_FORCE_INLINE SequenceBlocks(const AttentionArgs& args, const AttentionBatch& batch, int64_t sequence)
      : blocks(args.table.row(batch.rows[sequence])) {
    if (batch.sealed_lens == nullptr) return;
    sealed = args.sealed.table.row(batch.rows[sequence]);
    sealed_len = batch.sealed_lens[sequence];
  }
};

// One tile of keys: positions start .. start + 64, of which the item covers [first, last). Offsets are relative to a
// head's first byte and indexed by the order.
//
// With a selection, a tile is 64 consecutive keys of a head's list of selected keys: `start` counts in that list, and
// `positions` has the places of the keys in the sequence.
struct Tile {
  int64_t start;
  int first;
  int last;
  const Order* order;
  bool is_selected;
  int32_t positions[kTileTokens];
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
  const int16_t* query_integers;   // [rows, integer_padded dim]
  const IntegerRow* integer_rows;  // [rows]
  float* scores;                   // [rows, 64]; overwritten by the weights
  uint16_t* weights;               // [rows, 64], bfloat16
  float* acc;                      // [rows, acc_stride]
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

// Places rows [t, end) of a tile in block `named`, from offset `within` on. With a mask, the id of a block that no row
// attends to may be arbitrary; the block is not read.
PC_FORCE_INLINE void place_rows(const AttentionArgs& args, int64_t named, int64_t within, int t, int end, Tile& tile) {
  const Cache& key = args.key;
  const Cache& value = args.value;
  const int64_t id = named >= 0 && named < key.num_blocks && named < value.num_blocks ? named : 0;
  const auto place = [=](int64_t block_stride, int64_t token_stride, int64_t* offsets) __attribute__((always_inline)) {
    int64_t offset = id * block_stride + within * token_stride;
    for (int i = t; i < end; ++i, offset += token_stride) offsets[i] = offset;
  };
  place(key.block_stride, key.token_stride, tile.keys.codes);
  place(value.block_stride, value.token_stride, tile.values.codes);
  if (!tile.has_scales) return;
  place(key.scales.block_stride, key.scales.token_stride, tile.keys.scales);
  place(value.scales.block_stride, value.scales.token_stride, tile.values.scales);
}

// place_rows() for a sealed block.
PC_FORCE_INLINE void place_sealed(const AttentionArgs& args, int64_t named, int64_t within, int t, int end,
                                  Tile& tile) {
  const int64_t id = named >= 0 && named < args.sealed.num_blocks ? named : 0;
  const int64_t slot = id * args.key.block_size + within;
  for (int i = t; i < end; ++i) tile.keys.codes[i] = tile.values.codes[i] = slot + i - t;
  tile.keys.num_sealed = tile.values.num_sealed = end;
}

// Places rows [t, end) of a tile in the block at `index` of a sequence, from offset `within` on.
PC_FORCE_INLINE void place_in_block(const AttentionArgs& args, const SequenceBlocks& blocks, int64_t index,
                                    int64_t within, int t, int end, Tile& tile) {
  if (index * args.key.block_size < blocks.sealed_len) {
    return place_sealed(args, blocks.sealed.at(index), within, t, end, tile);
  }
  place_rows(args, blocks.blocks.at(index), within, t, end, tile);
}

// Begins the tile of `position`: the part of it that the item covers, in natural order.
PC_FORCE_INLINE void begin_tile(const AttentionArgs& args, const PcWorkItem& item, int64_t position, Tile& tile) {
  tile.start = position / kTileTokens * kTileTokens;
  tile.order = &kNatural;
  tile.is_selected = false;
  tile.keys.num_sealed = tile.values.num_sealed = 0;
  tile.has_scales = args.key.scales.data != nullptr || args.value.scales.data != nullptr;
  const int64_t end = tile.start + kTileTokens;
  tile.first = static_cast<int>(item.key_begin > tile.start ? item.key_begin - tile.start : 0);
  tile.last = static_cast<int>((item.key_end < end ? item.key_end : end) - tile.start);
}

// The end of the run of rows of a tile that begins at index t and has up to `count` rows.
PC_FORCE_INLINE int run_end(const Tile& tile, int t, int64_t count) {
  return count < tile.last - t ? t + static_cast<int>(count) : tile.last;
}

// Locates the tile of `position`, in natural order. Indices outside [first, last) repeat the nearest index inside.
inline void locate(const AttentionArgs& args, const SequenceBlocks& blocks, const PcWorkItem& item, int64_t position,
                   Tile& tile) {
  begin_tile(args, item, position, tile);
  const int64_t size = args.key.block_size;
  int64_t block = (tile.start + tile.first) / size;
  int64_t within = tile.start + tile.first - block * size;
  for (int t = tile.first; t < tile.last; ++block, within = 0) {
    const int end = run_end(tile, t, size - within);
    place_in_block(args, blocks, block, within, t, end, tile);
    t = end;
  }
  for (int t = 0; t < tile.first; ++t) copy_place(tile, tile.first, t);
  for (int t = tile.last; t < kTileTokens; ++t) copy_place(tile, tile.last - 1, t);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
