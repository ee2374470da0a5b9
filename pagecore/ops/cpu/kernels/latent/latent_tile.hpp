// A tile of up to 64 tokens of a latent cache: the addresses of its rows, and the rows of queries that attend to them.
#pragma once

#include "pagecore/ops/cpu/kernels/latent/latent_unpack.hpp"
#include "pagecore/ops/key_range.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Positions start .. start + 64, of which the item covers [first, last). `start` is a multiple of 64. In a list of
// slots positions count in the list, and the tokens of a tile follow each other without the negative slots.
struct LatentTile {
  int64_t start = 0;
  int first = 0;
  int last = 0;
  const char* latent[kTileTokens];
  const char* rope[kTileTokens];

  PC_FORCE_INLINE void place(int t, const LatentRow& row) {
    latent[t] = row.latent;
    rope[t] = row.rope;
  }
};

// The tokens at positions [begin, end) of a sequence, which are in one tile.
inline void locate_tokens(const LatentArgs& args, const Indices& blocks, int64_t begin, int64_t end, LatentTile& tile) {
  const LatentCache& cache = args.cache;
  tile.first = static_cast<int>(begin - tile.start);
  tile.last = static_cast<int>(end - tile.start);
  int64_t block = begin / cache.block_size, within = begin - block * cache.block_size;
  for (int t = tile.first; t < tile.last; ++block, within = 0) {
    // The check has read this number before; another thread may have changed it since.
    const int64_t named = blocks.at(block), id = named >= 0 && named < cache.num_blocks ? named : 0;
    const int64_t left = cache.block_size - within;
    const int end = left < tile.last - t ? t + static_cast<int>(left) : tile.last;
    LatentRow row = latent_row(cache, id, within);
    for (; t < end; ++t, row.latent += cache.token_stride, row.rope += cache.rope_token_stride) tile.place(t, row);
  }
}

// The tokens in slots [begin, end) of a list; negative slots are left out.
inline void locate_slots(const LatentArgs& args, const Indices& slots, int64_t begin, int64_t end, LatentTile& tile) {
  const LatentCache& cache = args.cache;
  const int64_t limit = cache.num_blocks * cache.block_size;
  tile.first = tile.last = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t slot = slots.at(i);
    if (slot < 0 || slot >= limit) continue;
    const int64_t block = slot / cache.block_size;
    tile.place(tile.last++, latent_row(cache, block, slot - block * cache.block_size));
  }
}

// Sets low and high of each query row for a tile. Returns true if all rows attend to all of the
// item's tokens.
inline bool see_tile(const LatentArgs& args, const AttentionBatch& batch, const PcWorkItem& item,
                     const LatentTile& tile, const LatentScratch& scratch) {
  const int64_t heads = args.call.query.num_heads, length = batch.seq_lens[item.sequence];
  const int64_t position = length - (batch.cu_query_lens[item.sequence + 1] - item.query_begin);
  const Window window = make_window(args.call.causal, args.call.window_left, args.call.window_right);
  const auto clamp = [&](int64_t at) {
    const int64_t t = at - tile.start;
    return static_cast<int32_t>(t < tile.first ? tile.first : t > tile.last ? tile.last : t);
  };
  bool whole = true;
  for (int64_t query = 0; query < item.query_count; ++query) {
    const KeyRange keys = attended_keys(window, position + query, position + query, length);
    const int32_t low = args.sparse ? tile.first : clamp(keys.begin), high = args.sparse ? tile.last : clamp(keys.end);
    whole = whole && low == tile.first && high == tile.last;
    for (int64_t head = 0; head < heads; ++head) {
      scratch.low[query * heads + head] = low;
      scratch.high[query * heads + head] = high;
    }
  }
  return whole;
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
