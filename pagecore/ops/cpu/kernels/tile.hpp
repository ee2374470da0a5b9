// Where the tokens of a tile lie in the cache.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// One tile of keys: positions start .. start + 64, of which the item has first .. last. Offsets from a head's first
// byte.
struct Tile {
  int64_t start;
  int first;
  int last;
  int64_t key_offsets[kTileTokens];
  int64_t value_offsets[kTileTokens];
};

PC_FORCE_INLINE void copy_place(Tile& tile, int from, int to) {
  tile.key_offsets[to] = tile.key_offsets[from];
  tile.value_offsets[to] = tile.value_offsets[from];
}

// The tile that holds `position`. Places outside the item's keys stand for the nearest inside.
inline void locate(const AttentionArgs& args, const Indices& blocks, const PcWorkItem& item, int64_t position,
                   Tile& tile) {
  const Cache& key = args.key;
  const Cache& value = args.value;
  tile.start = position / kTileTokens * kTileTokens;
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
