// Tiles of selected keys: each key head reads the blocks, or single tokens, of its own list.
//
// The selected keys of a head, in ascending order, are numbered 0, 1, 2 ...; items, tiles and folds count in these
// numbers, as they count in positions without a selection. Windows, masks and biases use the positions.
#pragma once

#include "pagecore/ops/cpu/kernels/tiles/tile.hpp"
#include "pagecore/ops/key_range.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The selection of one sequence and key head: ascending numbers of units of `unit` tokens, which divides the block
// size. Absent when entries is null.
struct SelectedKeys {
  const int32_t* entries = nullptr;
  int64_t count = 0;
  int64_t unit = 1;
};

PC_FORCE_INLINE SelectedKeys selected_keys(const AttentionArgs& args, const AttentionBatch& batch, int64_t sequence,
                                           int64_t head) {
  if (batch.selected == nullptr) return {};
  const int64_t at = sequence * args.key.num_heads + head;
  return {batch.selected + at * args.selection.width, batch.selected_counts[at], args.selection.unit};
}

// The number of selected keys before `position`.
inline int64_t num_selected_before(const SelectedKeys& keys, int64_t position) {
  int64_t low = 0, high = keys.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if ((keys.entries[middle] + int64_t{1}) * keys.unit <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const int64_t start = low < keys.count ? keys.entries[low] * keys.unit : position;
  return low * keys.unit + (start < position ? position - start : 0);
}

// The item with its keys cut to those that the head has selected and some query of the item may attend to.
inline PcWorkItem selected_item(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item,
                                const SelectedKeys& keys) {
  const int64_t length = batch.seq_lens[item.sequence];
  const int64_t first = length - (batch.cu_query_lens[item.sequence + 1] - item.query_begin);
  const Window window = make_window(args.causal, args.window_left, args.window_right);
  const KeyRange range = attended_keys(window, first, first + item.query_count - 1, length);
  const int64_t begin = num_selected_before(keys, range.begin), end = num_selected_before(keys, range.end);
  PcWorkItem cut = item;
  if (begin > cut.key_begin) cut.key_begin = static_cast<int32_t>(begin);
  if (end < cut.key_end) cut.key_end = static_cast<int32_t>(end);
  return cut;
}

PC_FORCE_INLINE void copy_selected_place(Tile& tile, int from, int to) {
  copy_place(tile, from, to);
  tile.positions[to] = tile.positions[from];
}

// locate() in the head's list.
inline void locate_selected(const AttentionArgs& args, const SequenceBlocks& blocks, const SelectedKeys& keys,
                            const PcWorkItem& item, int64_t position, Tile& tile) {
  begin_tile(args, item, position, tile);
  tile.is_selected = true;
  int64_t entry = (tile.start + tile.first) / keys.unit;
  int64_t within = tile.start + tile.first - entry * keys.unit;
  for (int t = tile.first; t < tile.last; ++entry, within = 0) {
    const int64_t at = keys.entries[entry] * keys.unit + within, block = at / args.key.block_size;
    const int end = run_end(tile, t, keys.unit - within);
    place_in_block(args, blocks, block, at - block * args.key.block_size, t, end, tile);
    for (int i = t; i < end; ++i) tile.positions[i] = static_cast<int32_t>(at + i - t);
    t = end;
  }
  for (int t = 0; t < tile.first; ++t) copy_selected_place(tile, tile.first, t);
  for (int t = tile.last; t < kTileTokens; ++t) copy_selected_place(tile, tile.last - 1, t);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
