// Where the tokens of a tile lie in the cache.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The order in which a tile's tokens are visited. Natural is by position. Where all rows attend to all 64 tokens, the
// four quarters of the tile take turns, so that memory is read in four streams (of four blocks, where these have 16
// tokens): what fetches ahead of the processor then fetches ahead in all of them.
//
//   natural       0 1 2 3 4 ...           interleaved   0 16 32 48 1 17 33 49 2 ...
enum class Order { Natural, Interleaved };

constexpr int kStreams = 4;
constexpr int kStreamTokens = kTileTokens / kStreams;

// Which token of the tile is visited at `place`.
constexpr int interleaved_token(int place) { return place % kStreams * kStreamTokens + place / kStreams; }

// One tile of keys: positions start .. start + 64, of which the item has first .. last. Offsets from a head's first
// byte, by place.
struct Tile {
  int64_t start;
  int first;
  int last;
  Order order;
  int64_t key_offsets[kTileTokens];
  int64_t value_offsets[kTileTokens];
};

// Which tokens of a tile, in natural order, some row attends to: [first, last), and of those where `used` is not 0. The
// rest must not be read.
struct TileUse {
  int first;
  int last;
  const uint8_t* used;  // [64], or null: all
};

PC_FORCE_INLINE void copy_place(Tile& tile, int from, int to) {
  tile.key_offsets[to] = tile.key_offsets[from];
  tile.value_offsets[to] = tile.value_offsets[from];
}

PC_FORCE_INLINE void reorder(int64_t (&offsets)[kTileTokens], Order order) {
  int64_t before[kTileTokens];
  __builtin_memcpy(before, offsets, sizeof before);
  for (int place = 0; place < kTileTokens; ++place) {
    const int token = interleaved_token(place);
    if (order == Order::Interleaved) {
      offsets[place] = before[token];
    } else {
      offsets[token] = before[place];
    }
  }
}

PC_FORCE_INLINE void set_order(Tile& tile, Order order) {
  if (tile.order == order) return;
  reorder(tile.key_offsets, order);
  reorder(tile.value_offsets, order);
  tile.order = order;
}

// The tile that holds `position`, in natural order. Places outside the item's keys stand for the nearest inside.
inline void locate(const AttentionArgs& args, const Indices& blocks, const PcWorkItem& item, int64_t position,
                   Tile& tile) {
  const Cache& key = args.key;
  const Cache& value = args.value;
  tile.start = position / kTileTokens * kTileTokens;
  tile.order = Order::Natural;
  const int64_t end = tile.start + kTileTokens;
  tile.first = static_cast<int>(item.key_begin > tile.start ? item.key_begin - tile.start : 0);
  tile.last = static_cast<int>((item.key_end < end ? item.key_end : end) - tile.start);
  int64_t block = (tile.start + tile.first) / key.block_size;
  int64_t within = tile.start + tile.first - block * key.block_size;
  for (int t = tile.first; t < tile.last; ++block, within = 0) {
    // With a mask, the id of a block that nobody attends to may be anything; nothing is read there.
    const int64_t named = blocks.at(block);
    const int64_t id = named >= 0 && named < key.num_blocks ? named : 0;
    int64_t key_offset = id * key.block_stride + within * key.token_stride;
    int64_t value_offset = id * value.block_stride + within * value.token_stride;
    for (; t < tile.last && within < key.block_size; ++t, ++within) {
      tile.key_offsets[t] = key_offset;
      tile.value_offsets[t] = value_offset;
      key_offset += key.token_stride;
      value_offset += value.token_stride;
    }
  }
  for (int t = 0; t < tile.first; ++t) copy_place(tile, tile.first, t);
  for (int t = tile.last; t < kTileTokens; ++t) copy_place(tile, tile.last - 1, t);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
