// Plans for CUDA: the tiles of plan.hpp, split and assigned to CTAs, in a buffer of fixed layout.
//
// C1: over both sections, every pair (query row, key that it may attend to) is in exactly one item, and every query row
//     is in at least one (P1, P2 of plan.hpp).
// C2: keys are split at multiples of split_floor. In a batch-invariant plan a tile is whole or split at every multiple
//     of kFoldTokens; a kernel folds a whole tile at the same multiples, so the bits of the result are equal.
// C3: no array exceeds the capacities of its layout; see `make_layout` in plan_layout.hpp.
// C4: the plan depends on the lengths and options alone.
// C5: sinks are items of their own, the first split of their tile (abi/plan.h).
// Cost: O(n log n) for n items, no allocation once the buffers have grown. Threads: one planner, one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "cuda_src/abi/plan.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/native/rounding.hpp"
#include "pagecore/ops/cuda/plan/plan_layout.hpp"
#include "pagecore/ops/plan.hpp"

namespace pagecore {

class CudaPlanner {
 public:
  // Write the plan to `buffer`, planned_bytes(layout) at a multiple of 16, and return the bytes in use. The lengths
  // have passed check_plan_batch. A batch beyond the capacities of the layout throws before anything is written.
  int64_t plan_into(const PcPlanLayout& layout, const PlanOptions& options, const PlanBatch& batch, void* buffer) {
    const int64_t n = batch.num_sequences, num_tokens = n == 0 ? 0 : batch.query_end(n - 1);
    PC_EXPECTS(n <= layout.max_sequences && num_tokens <= layout.max_tokens, ShapeError, "the batch has ", n,
               " sequences and ", num_tokens, " queries; the plan has room for ", layout.max_sequences, " and ",
               layout.max_tokens, "; make one with larger max_sequences and max_tokens");
    layout_ = &layout;
    sinks_ = options.sink_tokens;
    buffer_ = static_cast<char*>(buffer);
    PcPlanHead head = {};
    head.num_sequences = static_cast<pc_int32>(n);
    int64_t num_items = 0;
    for (int id = PC_DECODE; id < PC_NUM_SECTIONS; ++id) {
      const Assignment& deal = plan_section(static_cast<PcSectionId>(id), options, batch);
      const int64_t written = write(layout.sections[id], deal, num_items);
      head.num_items[id] = static_cast<pc_int32>(written);
      head.num_partial_rows[id] = static_cast<pc_int32>(deal.num_partial_rows);
      num_items += written;
    }
    std::memcpy(buffer_, &head, sizeof(head));
    write_mask_starts(batch);
    return layout.items + num_items * static_cast<int64_t>(sizeof(PcWorkItem));
  }

 private:
  struct Load {
    int64_t cost;
    int32_t worker;
  };
  static constexpr int64_t kMaxCost = (int64_t{1} << 31) + kItemCost;

  // Items grouped by worker: worker w has first_item[w] .. first_item[w + 1] - 1. The items over sinks are left out,
  // but their partial rows precede those of the first split of the tile.
  struct Assignment {
    bool has_sinks = false;
    std::vector<PcWorkItem> items;
    std::vector<int32_t> first_item;
    int64_t num_partial_rows = 0;
    int64_t longest = 0;  // largest cost of a worker

    void clear() {
      items.clear();
      first_item.clear();
      num_partial_rows = longest = 0;
    }

    void add(const PcWorkItem& tile, int64_t key_begin, int64_t key_end, int64_t split, int64_t num_splits) {
      PcWorkItem piece = tile;
      piece.key_begin = static_cast<pc_int32>(key_begin);
      piece.key_end = static_cast<pc_int32>(key_end);
      if (has_sinks && split == 0) num_partial_rows += tile.query_count;
      piece.partial = num_splits == 1 && !has_sinks ? -1 : static_cast<pc_int32>(num_partial_rows);
      piece.split = static_cast<pc_int32>(split);
      piece.num_splits = static_cast<pc_int32>(num_splits);
      if (num_splits > 1 || has_sinks) num_partial_rows += tile.query_count;
      items.push_back(piece);
    }
  };

  static int64_t cost_of(const PcWorkItem& item) { return int64_t{item.key_end} - item.key_begin + kItemCost; }

  const Assignment& plan_section(PcSectionId id, const PlanOptions& options, const PlanBatch& batch) {
    const PcPlanSection& section = layout_->sections[id];
    find_tiles(id, options, batch);
    cut_.has_sinks = sinks_ > 0;
    total_ = 0;
    for (const PcWorkItem& tile : tiles()) total_ += cost_of(tile);
    if (layout_->batch_invariant != 0) {
      cut_in_folds(batch);
      return deal_out(section.num_workers);
    }
    cut_by_length(section);
    deal_out(section.num_workers);
    // Borders balance a few long pieces better, such as four pieces among three workers.
    if (dealt_.longest * section.num_workers <= total_ + total_ / 8) return dealt_;
    cut_by_borders(section);
    return cut_.longest < dealt_.longest ? cut_ : dealt_;
  }

  // Find the whole tiles of a section.
  void find_tiles(PcSectionId id, const PlanOptions& options, const PlanBatch& batch) {
    const int64_t decode_rows = layout_->batch_invariant != 0 ? 0 : kDecodeRows;
    PlanOptions tiling;
    tiling.num_query_heads = layout_->group;
    tiling.causal = options.causal;
    tiling.window_left = options.window_left;
    tiling.window_right = options.window_right;
    tiling.sink_tokens = options.sink_tokens;
    tiling.tree = options.tree;
    tiling.query_tile = layout_->sections[id].query_tile;
    if (id == PC_DECODE) tiling.max_rows = decode_rows;
    if (id == PC_PROMPTS) tiling.min_rows = decode_rows + 1;
    // The buffer never shrinks: a resize would fill the room after the tiles in every plan.
    if (std::ssize(tile_buffer_) < layout_->max_items) tile_buffer_.resize(static_cast<size_t>(layout_->max_items));
    num_tiles_ = make_plan(tiling, batch, tile_buffer_.data(), layout_->max_items).num_items;
    PC_ASSERT(num_tiles_ <= layout_->max_items);
  }

  [[nodiscard]] std::span<const PcWorkItem> tiles() const {
    return {tile_buffer_.data(), static_cast<size_t>(num_tiles_)};
  }

  // Split tiles longer than a share, rounded up to a multiple of split_floor, at the multiples of that length.
  void cut_by_length(const PcPlanSection& section) {
    const int64_t share = ceil_div(total_, section.num_workers);
    const int64_t piece = round_up(share, section.split_floor);
    cut_.clear();
    for (const PcWorkItem& tile : tiles()) {
      const bool is_long = section.num_workers > 1 && tile.key_end - tile.key_begin > piece;
      cut_tile(tile, is_long ? piece : 0);
    }
  }

  // Split tiles that hold all queries of their sequence at every multiple of kFoldTokens, while partial rows remain;
  // with sinks, split all tiles.
  void cut_in_folds(const PlanBatch& batch) {
    cut_.clear();
    for (const PcWorkItem& tile : tiles()) {
      const bool alone = batch.query_end(tile.sequence) - batch.query_begin(tile.sequence) == tile.query_count;
      const int64_t splits = num_pieces(tile, kFoldTokens);
      const bool fits = cut_.num_partial_rows + splits * tile.query_count <= layout_->num_split_rows;
      cut_tile(tile, splits > 1 && (sinks_ > 0 || (alone && fits)) ? kFoldTokens : 0);
    }
  }

  static int64_t num_pieces(const PcWorkItem& tile, int64_t piece) {
    return tile.key_begin == tile.key_end ? 1 : (tile.key_end - 1) / piece - tile.key_begin / piece + 1;
  }

  // Split a tile at multiples of `piece`; 0 leaves it whole.
  void cut_tile(const PcWorkItem& tile, int64_t piece) {
    if (piece == 0) return cut_.add(tile, tile.key_begin, tile.key_end, 0, 1);
    const int64_t first = tile.key_begin / piece, splits = num_pieces(tile, piece);
    for (int64_t i = 0; i < splits; ++i) {
      cut_.add(tile, std::max<int64_t>(tile.key_begin, (first + i) * piece),
               std::min<int64_t>(tile.key_end, (first + i + 1) * piece), i, splits);
    }
  }

  // Assign the pieces of cut_, longest first, each to the worker with the least cost so far.
  const Assignment& deal_out(int32_t num_workers) {
    const auto& pieces = cut_.items;
    order_.resize(pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) {
      order_[i] = static_cast<uint64_t>(kMaxCost - cost_of(pieces[i])) << 32 | i;  // ties: the first piece
    }
    std::sort(order_.begin(), order_.end());
    heap_.clear();
    for (int32_t w = 0; w < num_workers; ++w) heap_.push_back({0, w});
    dealt_.clear();
    dealt_.num_partial_rows = cut_.num_partial_rows;
    dealt_.first_item.assign(static_cast<size_t>(num_workers) + 1, 0);
    worker_of_.resize(pieces.size());
    for (size_t i = 0; i < order_.size(); ++i) {
      heap_[0].cost += cost_of(pieces[piece_at(i)]);
      dealt_.longest = std::max(dealt_.longest, heap_[0].cost);
      worker_of_[i] = heap_[0].worker;
      ++dealt_.first_item[static_cast<size_t>(heap_[0].worker) + 1];
      sink_first();
    }
    auto& first = dealt_.first_item;
    for (size_t w = 1; w < first.size(); ++w) first[w] += first[w - 1];
    next_.assign(first.begin(), first.end());
    dealt_.items.resize(pieces.size());
    for (size_t i = 0; i < order_.size(); ++i) {
      const int32_t to = next_[static_cast<size_t>(worker_of_[i])]++;
      dealt_.items[static_cast<size_t>(to)] = pieces[piece_at(i)];
    }
    return dealt_;
  }

  [[nodiscard]] size_t piece_at(size_t i) const { return order_[i] & 0xffffffff; }

  // Restore the heap after the cost of its first worker has grown.
  void sink_first() {
    const Load sinking = heap_[0];
    const size_t size = heap_.size();
    size_t at = 0;
    for (size_t child = 1; child < size; child = 2 * at + 1) {
      if (child + 1 < size && heap_[child + 1].cost < heap_[child].cost) ++child;
      if (heap_[child].cost >= sinking.cost) break;
      heap_[at] = heap_[child];
      at = child;
    }
    heap_[at] = sinking;
  }

  // Split tiles at the borders of equal shares, as the kernel `plan` does; write cut_ in the order of the batch.
  void cut_by_borders(const PcPlanSection& section) {
    cut_.clear();
    const Shares shares = {total_, section.num_workers};
    int64_t cost_begin = 0, load = 0;
    int32_t first = 0;
    for (const PcWorkItem& tile : tiles()) {
      const int64_t cost = cost_of(tile);
      const TileCuts cuts = {tile.key_begin, tile.key_end, section.split_floor, section.split_floor / 2};
      const int32_t end = shares.border_from(cost_begin + cost);
      int64_t splits = 1, split = 0;
      int32_t begin = tile.key_begin;
      border_keys_.clear();
      for (int32_t w = first; w < end; ++w) {
        const int32_t key = cuts.cut(shares.cost_at(w) - cost_begin, cost);
        border_keys_.push_back(key);
        if (key <= begin || key == TileCuts::kBehind) continue;
        ++splits;
        begin = key;
      }
      begin = tile.key_begin;
      bool is_open = true;  // part of the tile is not assigned yet
      const auto add_until = [&](int32_t key) {
        if (!is_open || key <= begin) return;
        const int32_t stop = std::min(key, tile.key_end);
        cut_.add(tile, begin, stop, split++, splits);
        load += cost_of(cut_.items.back());
        cut_.longest = std::max(cut_.longest, load);
        is_open = key != TileCuts::kBehind;
        begin = stop;
      };
      for (const int32_t key : border_keys_) {
        add_until(key);
        cut_.first_item.push_back(static_cast<int32_t>(cut_.items.size()));
        load = 0;
      }
      add_until(TileCuts::kBehind);
      cost_begin += cost;
      first = end;
    }
    cut_.first_item.resize(static_cast<size_t>(section.num_workers) + 1, static_cast<int32_t>(cut_.items.size()));
  }

  // Writes the items of a section after the `first` of the earlier sections; returns their number.
  int64_t write(const PcPlanSection& section, const Assignment& deal, int64_t first) {
    PC_ASSERT(deal.num_partial_rows <= layout_->num_split_rows);
    PC_ASSERT(static_cast<int64_t>(deal.first_item.size()) == section.num_workers + 1);
    auto* first_item = at<pc_int32>(section.first_item);
    if (sinks_ > 0) return write_with_sinks(deal, first, first_item);
    const auto n = static_cast<int64_t>(deal.items.size());
    PC_ASSERT(first + n <= layout_->max_items);
    std::copy_n(deal.items.data(), n, at<PcWorkItem>(layout_->items) + first);
    for (const int32_t each : deal.first_item) *first_item++ = static_cast<pc_int32>(first + each);
    return n;
  }

  // Writes each item as one split later than it is, and before the first of a tile an item over the sinks.
  int64_t write_with_sinks(const Assignment& deal, int64_t first, pc_int32* first_item) {
    auto* const items = at<PcWorkItem>(layout_->items);
    int64_t to = first;
    for (size_t worker = 0; worker + 1 < deal.first_item.size(); ++worker) {
      *first_item++ = static_cast<pc_int32>(to);
      for (int32_t i = deal.first_item[worker]; i < deal.first_item[worker + 1]; ++i) {
        PcWorkItem item = deal.items[static_cast<size_t>(i)];
        ++item.num_splits;
        PC_ASSERT(to + (item.split == 0 ? 2 : 1) <= layout_->max_items);
        if (item.split++ == 0) {
          PcWorkItem sinks = item;
          sinks.key_begin = 0;
          sinks.key_end = static_cast<pc_int32>(std::min<int64_t>(sinks_, item.key_end));
          sinks.partial -= item.query_count;
          sinks.split = 0;
          items[to++] = sinks;
        }
        items[to++] = item;
      }
    }
    *first_item = static_cast<pc_int32>(to);
    return to - first;
  }

  void write_mask_starts(const PlanBatch& batch) {
    auto* starts = at<pc_int64>(layout_->mask_starts);
    pc_int64 begin = 0;
    for (int64_t i = 0; i < batch.num_sequences; ++i) {
      starts[i] = begin;
      begin += (batch.query_end(i) - batch.query_begin(i)) * batch.seq_lens[i];
    }
  }

  template <typename T>
  [[nodiscard]] T* at(int64_t byte) const {
    return reinterpret_cast<T*>(buffer_ + byte);
  }

  const PcPlanLayout* layout_ = nullptr;
  int64_t sinks_ = 0;
  char* buffer_ = nullptr;
  std::vector<PcWorkItem> tile_buffer_;
  int64_t num_tiles_ = 0;
  int64_t total_ = 0;  // cost of all tiles
  Assignment cut_, dealt_;
  std::vector<uint64_t> order_;  // sort keys of pieces: cost, then index
  std::vector<Load> heap_;
  std::vector<int32_t> worker_of_, next_, border_keys_;
};

}  // namespace pagecore
