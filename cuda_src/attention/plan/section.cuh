// One section of a plan: its tiles, the borders of equal shares, and the items between cuts. plan.cu lists the steps.
#pragma once

#include "cuda_src/abi/plan.h"
#include "cuda_src/attention/inputs/batch.cuh"
#include "cuda_src/device/block_sums.cuh"

namespace pagecore {

// Binary search: returns the last i in [0, count) with at(i) <= value, for non-decreasing at; 0 if there is none.
template <typename At>
PC_DEVICE int last_at_most(int count, pc_int64 value, const At& at) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (at(middle) <= value ? low : high) = middle;
  }
  return low;
}

class PlanSection {
 public:
  PC_MEMBER PlanSection(const PcPlanParams& params, const BlockScan<PC_PLAN_THREADS>& block, PcSectionId id)
      : params_(params),
        block_(block),
        section_(params.layout.sections[id]),
        invariant_(params.layout.batch_invariant != 0),
        sinks_(params.attention.sink_tokens > 0 ? 1 : 0),
        first_item_(params.buffer + section_.first_item),
        items_(params.buffer + params.layout.items),
        tile_starts_(params.buffer + params.layout.tile_starts + sizeof(pc_int32) * id * params.layout.max_sequences),
        tiles_(params.buffer + params.layout.tiles),
        border_tiles_(params.buffer + params.layout.borders),
        border_keys_(border_tiles_ + (params.layout.max_borders + 1)),
        cuts_before_(border_keys_ + (params.layout.max_borders + 1)),
        cut_keys_(cuts_before_ + (params.layout.max_borders + 1)),
        tile_costs_(params.buffer + params.layout.tile_costs) {}

  // Writes the section's items from index `first` on. `num_tiles`: tiles according to tile_starts.
  PC_MEMBER void run(int first, pc_int64 num_tiles) {
    num_tiles_ = clamp(num_tiles, 0, params_.layout.max_tiles);
    num_items_ = 0;
    num_partial_rows_ = 0;
    load_tiles();
    if (num_tiles_ == 0) {
      for (int w = pc_thread(); w < section_.num_workers; w += PC_PLAN_THREADS) first_item_.store(w, first);
    } else if (invariant_) {
      place_folds();
      deal_folds(first);
    } else {
      cut_at_borders(first);
      place_pieces();
    }
    write_items(first);
    if (pc_thread() == 0) first_item_.store(section_.num_workers, first + num_items_);
  }

  PC_MEMBER int num_items() const { return num_items_; }
  PC_MEMBER int num_partial_rows() const { return num_partial_rows_; }

 private:
  // ---- tiles

  PC_MEMBER static pc_int64 cost_of(const PcPlanTile& tile) {
    return static_cast<pc_int64>(tile.key_end) - tile.key_begin + kItemCost;
  }

  PC_MEMBER PcPlanTile tile_at(int t) const {
    const pc_vector a = tiles_.load_vector(8LL * t), b = tiles_.load_vector(8LL * t + 4);
    return {static_cast<int>(a.word[0]), static_cast<int>(a.word[1]), static_cast<int>(a.word[2]),
            static_cast<int>(a.word[3]), static_cast<int>(b.word[0]), static_cast<int>(b.word[1]),
            static_cast<int>(b.word[2]), static_cast<int>(b.word[3])};
  }

  PC_MEMBER void store_tile(int t, const PcPlanTile& tile) const {
    const pc_vector a = {{static_cast<pc_uint32>(tile.sequence), static_cast<pc_uint32>(tile.query_begin),
                          static_cast<pc_uint32>(tile.query_count), static_cast<pc_uint32>(tile.key_begin)}};
    tiles_.store_vector(8LL * t, a);
    store_pieces(t, tile);
  }

  // Stores only the second half of a tile.
  PC_MEMBER void store_pieces(int t, const PcPlanTile& tile) const {
    const pc_vector b = {{static_cast<pc_uint32>(tile.key_end), static_cast<pc_uint32>(tile.pieces),
                          static_cast<pc_uint32>(tile.first_item), static_cast<pc_uint32>(tile.partial)}};
    tiles_.store_vector(8LL * t + 4, b);
  }

  PC_MEMBER void load_tiles() {
    pc_int64 cost = 0;
    for (int base = 0; base < num_tiles_; base += PC_PLAN_THREADS) {
      const int t = base + pc_thread();
      const bool exists = t < num_tiles_;
      PcPlanTile tile = {};
      if (exists) tile = find_tile(t);
      pc_int64 all;
      const pc_int64 before = cost + block_.exclusive_sum(exists ? cost_of(tile) : 0, all);
      cost += all;
      if (!exists) continue;
      store_tile(t, tile);
      tile_costs_.store(t, before);
    }
    if (pc_thread() == 0) tile_costs_.store(num_tiles_, cost);
    shares_ = {cost, section_.num_workers};
    pc_sync_block();
  }

  // Returns tile t, with the number of pieces of a batch-invariant plan.
  PC_MEMBER PcPlanTile find_tile(int t) const {
    const PcAttentionParams& p = params_.attention;
    const int index = last_at_most(p.num_sequences, t, [&](int i) { return tile_starts_.load(i); });
    const Sequence sequence = load_sequence(p, index);
    PcPlanTile tile = {};
    tile.sequence = sequence.index;
    tile.query_begin = sequence.queries_begin + (t - tile_starts_.load(index)) * section_.query_tile;
    tile.query_count = min_of(section_.query_tile, sequence.queries_end - tile.query_begin);
    const int position = sequence.position(tile.query_begin), length = sequence.length;
    const int least = sequence.least_position<true>(p, tile.query_begin);
    tile.key_begin = max_of(attended_keys(p, least, length).begin, min_of(p.sink_tokens, length));
    tile.key_end = max_of(attended_keys(p, position + tile.query_count - 1, length).end, tile.key_begin);
    const bool is_alone = sequence.queries_end - sequence.queries_begin == tile.query_count;
    const bool folds = (is_alone || sinks_ != 0) && tile.key_begin != tile.key_end;
    tile.pieces = folds ? (tile.key_end - 1) / kFoldTokens - tile.key_begin / kFoldTokens + 1 : 1;
    return tile;
  }

  // ---- cuts at borders

  // Computes the key at which each border cuts. A border begins an item if its key lies after that of the border before
  // in the same tile.
  PC_MEMBER void cut_at_borders(int first) {
    int cuts = 0;
    for (int base = 0; base < section_.num_workers; base += PC_PLAN_THREADS) {
      const int w = base + pc_thread();
      const bool exists = w < section_.num_workers;
      int t = 0, key = 0, begin = 0;
      if (exists) {
        t = tile_of_border(w);
        const PcPlanTile tile = tile_at(t);
        begin = tile.key_begin;
        key = border_key(w, t, tile, section_.split_floor, section_.split_floor / 2);
        border_tiles_.store(w, t);
        border_keys_.store(w, key);
      }
      pc_sync_block();
      if (exists && w > 0 && border_tiles_.load(w - 1) == t) begin = max_of(begin, border_keys_.load(w - 1));
      const bool is_cut = exists && key > begin && key != TileCuts::kBehind;
      pc_int64 all;
      const int before = cuts + static_cast<int>(block_.exclusive_sum(is_cut, all));
      cuts += static_cast<int>(all);
      if (!exists) continue;
      cuts_before_.store(w, before);
      if (is_cut) cut_keys_.store(before, key);
      // One item for each tile and each cut so far, and this tile's last item if the border has moved to its end. Sinks
      // are an item of each tile that the border is not at the begin of.
      const int sinks = sinks_ * (t + (key > begin_of(t)));
      first_item_.store(w, first + t + before + is_cut + (key == TileCuts::kBehind) + sinks);
    }
    if (pc_thread() == 0) cuts_before_.store(section_.num_workers, cuts);
    num_items_ = num_tiles_ * (1 + sinks_) + cuts;
    pc_sync_block();
  }

  PC_MEMBER int tile_of_border(int w) const {
    return last_at_most(num_tiles_, shares_.cost_at(w), [&](int t) { return tile_costs_.load(t); });
  }

  PC_MEMBER int border_key(int w, int t, const PcPlanTile& tile, int unit, int least) const {
    const TileCuts cuts = {tile.key_begin, tile.key_end, unit, least};
    return cuts.cut(shares_.cost_at(w) - tile_costs_.load(t), cost_of(tile));
  }

  PC_MEMBER void place_pieces() {
    pc_int64 rows = 0;
    for (int base = 0; base < num_tiles_; base += PC_PLAN_THREADS) {
      const int t = base + pc_thread();
      const bool exists = t < num_tiles_;
      PcPlanTile tile = {};
      pc_int64 own = 0, all;
      if (exists) {
        tile = tile_at(t);
        const int before = cuts_before_.load(shares_.border_from(tile_costs_.load(t)));
        tile.pieces = 1 + cuts_before_.load(shares_.border_from(tile_costs_.load(t + 1))) - before;
        tile.first_item = t * (1 + sinks_) + before;
        own = rows_of(tile);
      }
      const pc_int64 partial = rows + block_.exclusive_sum(own, all);
      tile.partial = static_cast<int>(partial);
      rows += all;
      if (!exists) continue;
      store_pieces(t, tile);
      if (sinks_ != 0) drop_without_room(t, partial + own);
    }
    finish_rows(rows);
  }

  // ---- cuts at folds

  PC_MEMBER void place_folds() {
    pc_int64 rows = 0;
    for (int base = 0; base < num_tiles_; base += PC_PLAN_THREADS) {
      const int t = base + pc_thread();
      const bool exists = t < num_tiles_;
      PcPlanTile tile = {};
      if (exists) tile = tile_at(t);
      pc_int64 all;
      const pc_int64 own = rows_of(tile);
      const pc_int64 partial = rows + block_.exclusive_sum(own, all);
      rows += all;
      tile.partial = static_cast<int>(partial);
      if (partial + own > params_.layout.num_split_rows) tile.pieces = min_of(tile.pieces, 1);
      tile.first_item = num_items_ + static_cast<int>(block_.exclusive_sum(exists ? tile.pieces + sinks_ : 0, all));
      num_items_ += static_cast<int>(all);
      if (!exists) continue;
      store_pieces(t, tile);
      if (sinks_ != 0) drop_without_room(t, partial + own);
    }
    finish_rows(rows);
  }

  // Assigns whole pieces to workers: a border moves to the nearest fold or end of its tile.
  PC_MEMBER void deal_folds(int first) const {
    for (int w = pc_thread(); w < section_.num_workers; w += PC_PLAN_THREADS) {
      const int t = tile_of_border(w);
      const PcPlanTile tile = tile_at(t);
      // A tile of one piece is not cut: no border leaves enough keys on both sides.
      const int key = border_key(w, t, tile, kFoldTokens, tile.pieces > 1 ? 1 : 0x7fffffff);
      int done = tile.pieces;
      if (key == TileCuts::kBefore) done = 0;
      if (key >= 0 && key != TileCuts::kBehind) done = key / kFoldTokens - tile.key_begin / kFoldTokens;
      first_item_.store(w, first + tile.first_item + done + (done > 0 ? sinks_ : 0));
    }
  }

  // ---- items

  // Partial rows of a tile; none if it is one item.
  PC_MEMBER pc_int64 rows_of(const PcPlanTile& tile) const {
    const int parts = tile.pieces + sinks_;
    return parts > 1 ? static_cast<pc_int64>(parts) * tile.query_count : 0;
  }

  // Drops the queries of a tile whose partial rows end after those of the layout, because cu_query_lens is invalid.
  PC_MEMBER void drop_without_room(int t, pc_int64 end) const {
    if (end <= params_.layout.num_split_rows) return;
    PcPlanTile tile = tile_at(t);
    tile.query_count = tile.partial = 0;
    store_tile(t, tile);
  }

  PC_MEMBER int begin_of(int t) const { return tiles_.load(8LL * t + 3); }

  PC_MEMBER void finish_rows(pc_int64 rows) {
    num_partial_rows_ = min_of(clamp(rows, 0, 0x7fffffff), params_.layout.num_split_rows);
    pc_sync_block();
  }

  PC_MEMBER void write_items(int first) const {
    for (int i = pc_thread(); i < num_items_; i += PC_PLAN_THREADS) {
      const int t = last_at_most(num_tiles_, i, [&](int k) { return tiles_.load(8LL * k + 6); });
      const PcPlanTile tile = tile_at(t);
      const bool dropped = sinks_ != 0 && tile.query_count == 0;
      const int part = i - tile.first_item, piece = part - sinks_;
      const int split = dropped ? 0 : part, parts = dropped ? 1 : tile.pieces + sinks_;
      int key_begin = piece <= 0 ? tile.key_begin : cut_before(t, tile, piece);
      int key_end = piece == tile.pieces - 1 ? tile.key_end : cut_before(t, tile, piece + 1);
      if (piece < 0) {
        key_begin = 0;
        key_end = min_of(params_.attention.sink_tokens, tile.key_end);
      }
      const int partial = parts > 1 ? tile.partial + split * tile.query_count : -1;
      const pc_vector a = {{static_cast<pc_uint32>(tile.sequence), static_cast<pc_uint32>(tile.query_begin),
                            static_cast<pc_uint32>(tile.query_count), static_cast<pc_uint32>(key_begin)}};
      const pc_vector b = {{static_cast<pc_uint32>(key_end), static_cast<pc_uint32>(partial),
                            static_cast<pc_uint32>(split), static_cast<pc_uint32>(parts)}};
      items_.store_vector(8LL * (first + i), a);
      items_.store_vector(8LL * (first + i) + 4, b);
    }
  }

  // Returns the first key of piece `split` > 0 of a tile. With cuts at borders, the number of items before a tile is
  // the number of tiles plus the number of cuts before it.
  PC_MEMBER int cut_before(int t, const PcPlanTile& tile, int split) const {
    if (invariant_) return (tile.key_begin / kFoldTokens + split) * kFoldTokens;
    return cut_keys_.load(tile.first_item - t * (1 + sinks_) + split - 1);
  }

  const PcPlanParams& params_;
  const BlockScan<PC_PLAN_THREADS>& block_;
  PcPlanSection section_;
  bool invariant_;
  int sinks_;  // items of a tile over its sinks: 1 or 0
  Global<pc_int32> first_item_, items_, tile_starts_, tiles_;
  Global<pc_int32> border_tiles_, border_keys_, cuts_before_, cut_keys_;
  Global<pc_int64> tile_costs_;
  Shares shares_;
  int num_tiles_;
  int num_items_;
  int num_partial_rows_;
};

}  // namespace pagecore
