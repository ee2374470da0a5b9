// The plan of a batch whose lengths are known on the device alone: the sections and the layout that the host writes
// too.
//
// One CTA. Sequences, then tiles, are dealt out to its threads in rounds; what stands before a thread's own (tiles,
// cost, items, partial rows) comes from sums over the block. Tiles are cut at the borders of equal shares (ShareCuts),
// a batch-invariant plan at every kFoldTokens with the borders between pieces.
//
// Each sequence's lengths are read four times, tile_starts once for each tile and step of a binary search. Lengths that
// make no sense are cut as the attention kernels cut them; cu_query_lens that falls can make tiles overlap, and those
// that the buffer has no room for are left out.

#include "abi_plan.h"
#include "attention_batch.cuh"

namespace pagecore {

// Sums over the block, of 64 bits.
class BlockSum {
 public:
  PC_MEMBER explicit BlockSum(const Shared<pc_int64>& totals) : totals_(totals) {}

  // What the threads before this one have, and in `all` what every thread has.
  PC_MEMBER pc_int64 before(pc_int64 value, pc_int64& all) const {
    pc_int64 sum = value;
    for (int delta = 1; delta < 32; delta *= 2) {
      const int low = pc_shuffle_up(static_cast<int>(sum), delta);
      const int high = pc_shuffle_up(static_cast<int>(sum >> 32), delta);
      if (pc_lane() >= delta) sum += static_cast<pc_int64>(high) << 32 | static_cast<pc_uint32>(low);
    }
    pc_sync_block();  // the totals of the sum before have been read
    if (pc_lane() == 31) totals_.store(pc_warp(), sum);
    pc_sync_block();
    pc_int64 earlier = 0;
    all = 0;
    for (int w = 0; w < PC_PLAN_THREADS / 32; ++w) {
      const pc_int64 total = totals_.load(w);
      if (w < pc_warp()) earlier += total;
      all += total;
    }
    return earlier + sum - value;
  }

 private:
  Shared<pc_int64> totals_;
};

// Some queries of a sequence and the keys that any of them attends to.
struct PlanTile {
  Sequence sequence;
  int query_begin;
  int query_count;
  KeyRange keys;

  PC_MEMBER pc_int64 cost() const { return static_cast<pc_int64>(keys.end) - keys.begin + kItemCost; }
  PC_MEMBER bool is_alone() const { return sequence.queries_end - sequence.queries_begin == query_count; }
};

class PlanSection {
 public:
  PC_MEMBER PlanSection(const PcPlanParams& params, const BlockSum& block, PcSectionId id)
      : params_(params),
        block_(block),
        id_(id),
        section_(params.layout.sections[id]),
        first_item_(params.buffer + section_.first_item),
        items_(params.buffer + params.layout.items),
        tile_starts_(params.buffer + params.layout.tile_starts) {}

  // Writes the section's items from place `first` on.
  PC_MEMBER void run(int first) {
    find_tiles();
    find_total();
    pc_int64 cost = 0, rows = 0;
    num_items_ = 0;
    for (int base = 0; base < num_tiles_; base += PC_PLAN_THREADS) {
      const int t = base + pc_thread();
      const bool exists = t < num_tiles_;
      PlanTile tile;
      ShareCuts cuts;
      pc_int64 all;
      if (exists) tile = load_tile(t);
      const pc_int64 own_cost = exists ? tile.cost() : 0;
      cuts.cost_begin = cost + block_.before(own_cost, all);
      cost += all;
      const bool invariant = params_.layout.batch_invariant != 0;
      int pieces = 0;
      if (exists) pieces = invariant ? count_folds(tile) : start_cuts(tile, cuts);
      const pc_int64 own_rows = pieces > 1 ? static_cast<pc_int64>(pieces) * tile.query_count : 0;
      const pc_int64 partial = rows + block_.before(own_rows, all);
      rows += all;
      if (exists && invariant) {
        if (partial + own_rows > params_.layout.num_split_rows) pieces = 1;
        start_folds(tile, cuts, pieces);
      }
      const pc_int64 place = num_items_ + block_.before(pieces, all);
      num_items_ += static_cast<int>(all);
      if (exists) write_tile(tile, cuts, first + static_cast<int>(place), pieces, static_cast<int>(partial));
    }
    num_partial_rows_ = min_of(clamp(rows, 0, 0x7fffffff), params_.layout.num_split_rows);
    if (num_tiles_ == 0) {
      for (int w = pc_thread(); w < section_.num_workers; w += PC_PLAN_THREADS) first_item_.store(w, first);
    }
    if (pc_thread() == 0) first_item_.store(section_.num_workers, first + num_items_);
  }

  PC_MEMBER int num_items() const { return num_items_; }
  PC_MEMBER int num_partial_rows() const { return num_partial_rows_; }

 private:
  PC_MEMBER int num_sequences() const { return params_.attention.num_sequences; }

  // Where each sequence's tiles begin.
  PC_MEMBER void find_tiles() {
    pc_int64 tiles = 0;
    for (int base = 0; base < num_sequences(); base += PC_PLAN_THREADS) {
      const int i = base + pc_thread();
      int own = 0;
      if (i < num_sequences()) own = count_tiles(load_sequence(params_.attention, i));
      pc_int64 all;
      const pc_int64 before = tiles + block_.before(own, all);
      if (i < num_sequences()) tile_starts_.store(i, clamp(before, 0, 0x7fffffff));
      tiles += all;
    }
    const int room =
        params_.layout.max_sequences + params_.layout.max_tokens / params_.layout.sections[PC_PROMPTS].query_tile;
    num_tiles_ = clamp(tiles, 0, room);
    pc_sync_block();
  }

  PC_MEMBER int count_tiles(const Sequence& sequence) const {
    const int queries = max_of(sequence.queries_end - sequence.queries_begin, 0);
    const bool few = static_cast<pc_int64>(queries) * params_.layout.group <= kDecodeRows;
    const bool decode = few && params_.layout.batch_invariant == 0;
    return decode == (id_ == PC_DECODE) ? divide_up(queries, section_.query_tile) : 0;
  }

  PC_MEMBER void find_total() {
    pc_int64 own = 0;
    for (int t = pc_thread(); t < num_tiles_; t += PC_PLAN_THREADS) own += load_tile(t).cost();
    block_.before(own, total_);
  }

  PC_MEMBER PlanTile load_tile(int t) const {
    int low = 0, high = num_sequences();  // the last sequence whose tiles begin at t or before lies in [low, high)
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (tile_starts_.load(middle) <= t ? low : high) = middle;
    }
    const PcAttentionParams& p = params_.attention;
    PlanTile tile;
    tile.sequence = load_sequence(p, low);
    tile.query_begin = tile.sequence.queries_begin + (t - tile_starts_.load(low)) * section_.query_tile;
    tile.query_count = min_of(section_.query_tile, tile.sequence.queries_end - tile.query_begin);
    const int position = tile.sequence.position(tile.query_begin), length = tile.sequence.length;
    tile.keys.begin = attended_keys(p, position, length).begin;
    tile.keys.end = max_of(attended_keys(p, position + tile.query_count - 1, length).end, tile.keys.begin);
    return tile;
  }

  PC_MEMBER void set_cuts(const PlanTile& tile, ShareCuts& cuts, int unit, int least) const {
    cuts.cost = tile.cost();
    cuts.total = total_;
    cuts.num_workers = section_.num_workers;
    cuts.begin = tile.keys.begin;
    cuts.end = tile.keys.end;
    cuts.unit = unit;
    cuts.least = least;
  }

  // Returns how many pieces the borders make.
  PC_MEMBER int start_cuts(const PlanTile& tile, ShareCuts& cuts) const {
    set_cuts(tile, cuts, section_.split_floor, section_.split_floor / 2);
    int pieces = 1, at = tile.keys.begin;
    const int end = cuts.end_border();
    for (int w = cuts.first_border(); w < end; ++w) {
      const int key = cuts.cut(w);
      if (key <= at || key == ShareCuts::kBehind) continue;
      ++pieces;
      at = key;
    }
    return pieces;
  }

  // Pieces of kFoldTokens, of a tile that is all of its sequence.
  PC_MEMBER static int count_folds(const PlanTile& tile) {
    if (!tile.is_alone() || tile.keys.begin == tile.keys.end) return 1;
    return (tile.keys.end - 1) / kFoldTokens - tile.keys.begin / kFoldTokens + 1;
  }

  PC_MEMBER void start_folds(const PlanTile& tile, ShareCuts& cuts, int pieces) const {
    // A whole tile is not cut: no border leaves enough on both sides.
    set_cuts(tile, cuts, kFoldTokens, pieces > 1 ? 1 : 0x7fffffff);
  }

  PC_MEMBER void write_tile(const PlanTile& tile, const ShareCuts& cuts, int first, int pieces, int partial) const {
    const bool folds = params_.layout.batch_invariant != 0 && pieces > 1;
    const int end = cuts.end_border();
    int split = 0, at = tile.keys.begin;
    const auto write_until = [&](int key) {
      while (split < pieces && key > at) {
        int stop = min_of(key, tile.keys.end);
        if (folds) stop = min_of(stop, (at / kFoldTokens + 1) * kFoldTokens);
        write_item(tile, first, split++, pieces, partial, at, stop);
        at = stop;
      }
    };
    for (int w = cuts.first_border(); w < end; ++w) {
      write_until(cuts.cut(w));
      first_item_.store(w, first + split);
    }
    write_until(ShareCuts::kBehind);
  }

  PC_MEMBER void write_item(const PlanTile& tile, int first, int split, int pieces, int partial, int key_begin,
                            int key_end) const {
    const int own = pieces > 1 ? partial + split * tile.query_count : -1;
    const int words[8] = {
        tile.sequence.index, tile.query_begin, tile.query_count, key_begin, key_end, own, split, pieces};
    PC_UNROLL
    for (int k = 0; k < 8; ++k) items_.store(8 * (static_cast<pc_int64>(first) + split) + k, words[k]);
  }

  const PcPlanParams& params_;
  const BlockSum& block_;
  PcSectionId id_;
  PcPlanSection section_;
  Global<pc_int32> first_item_, items_, tile_starts_;
  int num_tiles_;
  pc_int64 total_;  // cost of all tiles
  int num_items_;
  int num_partial_rows_;
};

PC_DEVICE void write_mask_starts(const PcPlanParams& params, const BlockSum& block) {
  const Global<pc_int64> starts(params.buffer + params.layout.mask_starts);
  const int n = params.attention.num_sequences;
  pc_int64 begin = 0;
  for (int base = 0; base < n; base += PC_PLAN_THREADS) {
    const int i = base + pc_thread();
    pc_int64 own = 0, all;
    if (i < n) {
      const Sequence sequence = load_sequence(params.attention, i);
      own = static_cast<pc_int64>(max_of(sequence.queries_end - sequence.queries_begin, 0)) * sequence.length;
    }
    const pc_int64 before = begin + block.before(own, all);
    if (i < n) starts.store(i, before);
    begin += all;
  }
}

PC_KERNEL(PC_PLAN_THREADS, 1) void plan(const PcPlanParams params) {
  const BlockSum block(pc_shared_buffer().as<pc_int64>());
  write_mask_starts(params, block);
  PlanSection decode(params, block, PC_DECODE), prompts(params, block, PC_PROMPTS);
  decode.run(0);
  prompts.run(decode.num_items());  // sums before it writes: tile_starts have been read by then
  if (pc_thread() != 0) return;
  const Global<pc_int32> head(params.buffer);
  const int words[8] = {params.attention.num_sequences,
                        decode.num_items(),
                        prompts.num_items(),
                        decode.num_partial_rows(),
                        prompts.num_partial_rows(),
                        0,
                        0,
                        0};
  PC_UNROLL
  for (int k = 0; k < 8; ++k) head.store(k, words[k]);
}

}  // namespace pagecore
