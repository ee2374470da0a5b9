// The planner: cuts the attention of one batch into work items, for the host, CUDA and the emulator.
//
// It is stateless and writes items to a buffer of the caller. If the buffer is too small, it is filled, and the counts
// are those of the whole plan.
//
// P1: every pair (query row, key that it may attend to) is in exactly one item, and every query row is in at least one.
//     Sinks are in the items of split 0, in addition to the keys that these items name.
// P2: items stay within their sequence: queries in its rows of the packed array, keys in [0, seq_len).
// P3: keys are split only at absolute multiples of split_floor, which divides split_granule.
// P4: with batch_invariant the items of a sequence depend on its own lengths and the options alone.
// P5: otherwise, with several pieces per worker, no unit of work (the heads of an item that are computed together) is
//     longer than a worker's share / pieces_per_worker, or split_floor. Workers that claim units one by one therefore
//     exceed their share by at most that much.
// Cost: O(sequences + tiles + items that fit the buffer), no allocation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "cuda_src/abi/types.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/native/rounding.hpp"
#include "pagecore/ops/key_range.hpp"

namespace pagecore {

struct PlanOptions {
  int64_t num_query_heads = 1;
  int64_t num_kv_heads = 1;
  bool causal = true;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t sink_tokens = 0;  // an item of split 0 attends to these keys, too, before its own
  bool batch_invariant = false;
  // The new tokens of a sequence are a tree: those of a tile may have any position from the first new one on.
  bool tree = false;
  int64_t num_workers = 1;        // threads, or resident CTAs
  int64_t query_tile = 1;         // maximum of queries in an item
  int64_t pass_rows = 0;          // query rows up to which key heads of an item are computed together; 0: never
  int64_t pieces_per_worker = 1;  // more than 1 if idle workers claim pieces
  int64_t split_floor = 512;      // minimum of keys in a split, a multiple of the kernels' tile
  int64_t split_granule = 1024;   // keys of a batch-invariant split, and of the kernels' partial sums
  // Only sequences with min_rows to max_rows query rows (queries * heads of a group) are planned; P1 applies to these.
  int64_t min_rows = 0;
  int64_t max_rows = std::numeric_limits<int64_t>::max();
};

struct PlanCounts {
  int64_t num_items = 0;
  int64_t num_partial_rows = 0;
};

// The batch to plan. cu_query_lens may be null (one query for each sequence).
struct PlanBatch {
  const int32_t* cu_query_lens = nullptr;  // [num_sequences + 1]
  const int32_t* seq_lens = nullptr;       // [num_sequences]
  int64_t num_sequences = 0;

  [[nodiscard]] int64_t query_begin(int64_t i) const { return cu_query_lens == nullptr ? i : cu_query_lens[i]; }
  [[nodiscard]] int64_t query_end(int64_t i) const { return cu_query_lens == nullptr ? i + 1 : cu_query_lens[i + 1]; }
};

inline void check_plan_batch(const PlanBatch& batch) {
  const int32_t* cu = batch.cu_query_lens;
  if (cu != nullptr) {
    PC_EXPECTS(cu[0] == 0, ShapeError, "cu_query_lens starts at ", cu[0], "; it must start at 0");
  }
  for (int64_t i = 0; i < batch.num_sequences; ++i) {
    PC_EXPECTS(batch.seq_lens[i] >= 0, ShapeError, "seq_lens[", i, "] is ", batch.seq_lens[i], "; lengths are 0 to ",
               INT32_MAX);
    if (cu == nullptr) continue;
    PC_EXPECTS(cu[i] <= cu[i + 1], ShapeError, "cu_query_lens falls from ", cu[i], " to ", cu[i + 1], " at ", i + 1,
               "; it must never fall");
  }
}

class Planner {
 public:
  Planner(const PlanOptions& options, const PlanBatch& batch, PcWorkItem* items, int64_t capacity)
      : options_(options),
        batch_(batch),
        window_(make_window(options.causal, options.window_left, options.window_right, options.sink_tokens)),
        items_(items),
        capacity_(capacity) {}

  PlanCounts run() {
    piece_ = target_piece();
    for (int64_t i = 0; i < batch_.num_sequences; ++i) {
      const int64_t rows = queries(i) * (options_.num_query_heads / options_.num_kv_heads);
      if (rows >= options_.min_rows && rows <= options_.max_rows) plan_sequence(i);
    }
    return counts_;
  }

 private:
  struct Tile {
    int64_t sequence, begin, count;
    KeyRange keys;
  };

  [[nodiscard]] int64_t queries(int64_t sequence) const {
    return batch_.query_end(sequence) - batch_.query_begin(sequence);
  }

  template <typename Visit>
  void for_each_tile(int64_t sequence, Visit&& visit) const {
    const int64_t first = batch_.query_begin(sequence);
    const int64_t end = batch_.query_end(sequence);
    const int64_t length = batch_.seq_lens[sequence];
    for (int64_t begin = first; begin < end; begin += options_.query_tile) {
      const int64_t count = std::min(options_.query_tile, end - begin);
      const int64_t position = length - (end - begin);  // the queries are the last positions
      const int64_t earliest = options_.tree ? length - (end - first) : position;
      visit(Tile{sequence, begin, count, attended_keys(window_, earliest, position + count - 1, length)});
    }
  }

  // Return the target size of a unit of work, in keys times key heads; 0: unlimited.
  [[nodiscard]] int64_t target_piece() const {
    if (options_.num_workers <= 1 || options_.batch_invariant) return 0;
    int64_t total = 0;
    for (int64_t i = 0; i < batch_.num_sequences; ++i) {
      for_each_tile(i, [&](const Tile& tile) {
        total += tile.keys.end - tile.keys.begin + std::min(window_.sinks, tile.keys.end);
      });
    }
    total = std::min(total, std::numeric_limits<int64_t>::max() / options_.num_kv_heads);
    return std::max<int64_t>(1, total * options_.num_kv_heads / (options_.num_workers * options_.pieces_per_worker));
  }

  // Return the keys of a unit in a tile of `count` queries, a multiple of split_floor: rounded down with several pieces
  // per worker, up with one. Most tiles have one size, so the last result is kept.
  [[nodiscard]] int64_t piece_keys(int64_t count) {
    if (count == piece_count_) return piece_keys_;
    const int64_t rows = count * (options_.num_query_heads / options_.num_kv_heads), floor = options_.split_floor;
    const int64_t keys = piece_ / std::clamp<int64_t>(options_.pass_rows / rows, 1, options_.num_kv_heads);
    const int64_t rounded = options_.pieces_per_worker > 1 ? keys / floor * floor : round_up(keys, floor);
    piece_count_ = count;
    piece_keys_ = piece_ == 0 ? 0 : std::max(rounded, floor);
    return piece_keys_;
  }

  void plan_sequence(int64_t sequence) {
    // Prefill has enough items without splits, and its splits would need many partial rows; kernels sum by granules.
    const bool fixed = options_.batch_invariant && queries(sequence) <= options_.query_tile;
    for_each_tile(sequence,
                  [&](const Tile& tile) { plan_tile(tile, fixed ? options_.split_granule : piece_keys(tile.count)); });
  }

  // Split [begin, end) at multiples of `piece`; 0 leaves it whole.
  void plan_tile(const Tile& tile, int64_t piece) {
    const auto [begin, end] = tile.keys;
    if (piece == 0 || end <= piece || end == begin) return emit(tile, begin, end, -1, 0, 1);
    const int64_t first = begin / piece, last = (end - 1) / piece;
    if (first == last) return emit(tile, begin, end, -1, 0, 1);
    const int64_t splits = last - first + 1, partial = counts_.num_partial_rows;
    const int64_t written = std::clamp<int64_t>(capacity_ - counts_.num_items, 0, splits);
    for (int64_t i = 0; i < written; ++i) {
      const int64_t at = (first + i) * piece;
      emit(tile, std::max(begin, at), std::min(end, at + piece), partial + i * tile.count, i, splits);
    }
    counts_.num_items += splits - written;  // there may be millions that do not fit
    counts_.num_partial_rows += splits * tile.count;
  }

  void emit(const Tile& tile, int64_t key_begin, int64_t key_end, int64_t partial, int64_t split, int64_t num_splits) {
    if (counts_.num_items < capacity_) {
      items_[counts_.num_items] = {static_cast<int32_t>(tile.sequence), static_cast<int32_t>(tile.begin),
                                   static_cast<int32_t>(tile.count),    static_cast<int32_t>(key_begin),
                                   static_cast<int32_t>(key_end),       static_cast<int32_t>(partial),
                                   static_cast<int32_t>(split),         static_cast<int32_t>(num_splits)};
    }
    ++counts_.num_items;
  }

  PlanOptions options_;
  PlanBatch batch_;
  Window window_;
  PcWorkItem* items_;
  int64_t capacity_;
  int64_t piece_ = 0;
  int64_t piece_count_ = 0, piece_keys_ = 0;  // argument and result of the last piece_keys()
  PlanCounts counts_;
};

// Plan a batch whose lengths have passed check_plan_batch.
[[nodiscard]] inline PlanCounts make_plan(const PlanOptions& options, const PlanBatch& batch, PcWorkItem* items,
                                          int64_t capacity) {
  return Planner(options, batch, items, capacity).run();
}

// The items of a plan and the lengths that it was made for. Buffers grow and never shrink.
class Plan {
 public:
  PlanOptions options;

  // Replace the plan. Nothing has changed after an error.
  void replan(const PlanBatch& batch) {
    check_plan_batch(batch);
    const auto room = static_cast<int64_t>(items_.size());
    const PlanCounts counts = make_plan(options, batch, items_.data(), room);  // most plans fit
    try {
      make_room(batch, counts);
    } catch (...) {
      write_items(planned_options_, planned_batch());
      throw;
    }
    if (counts.num_items > room) write_items(options, batch);
    remember(batch);
    counts_ = counts;
  }

  [[nodiscard]] int64_t num_sequences() const { return num_sequences_; }
  [[nodiscard]] PlanCounts counts() const { return counts_; }
  [[nodiscard]] const PcWorkItem* items() const { return items_.data(); }
  [[nodiscard]] const int32_t* cu_query_lens() const { return cu_query_lens_.data(); }  // [num_sequences + 1]
  [[nodiscard]] const int32_t* seq_lens() const { return seq_lens_.data(); }            // [num_sequences]
  [[nodiscard]] int64_t num_bytes() const {
    return static_cast<int64_t>(items_.capacity() * sizeof(PcWorkItem) +
                                (cu_query_lens_.capacity() + seq_lens_.capacity()) * sizeof(int32_t));
  }

 private:
  static constexpr int64_t kMaxPartialRows = std::numeric_limits<int32_t>::max();

  void make_room(const PlanBatch& batch, const PlanCounts& counts) {
    PC_EXPECTS(counts.num_partial_rows <= kMaxPartialRows, ShapeError, "the plan has ", counts.num_partial_rows,
               " partial rows; the limit is ", kMaxPartialRows, ": use fewer workers or smaller batches");
    const auto grow = [](auto& values, int64_t size) {
      if (std::ssize(values) < size) values.resize(static_cast<size_t>(size));
    };
    grow(seq_lens_, batch.num_sequences);
    grow(cu_query_lens_, batch.num_sequences + 1);
    grow(items_, counts.num_items);
  }

  void write_items(const PlanOptions& of, const PlanBatch& batch) {
    static_cast<void>(make_plan(of, batch, items_.data(), static_cast<int64_t>(items_.size())));
  }

  // The batch of the current plan, in the plan's own buffers.
  [[nodiscard]] PlanBatch planned_batch() const { return {cu_query_lens_.data(), seq_lens_.data(), num_sequences_}; }

  void remember(const PlanBatch& batch) {
    const auto n = static_cast<size_t>(batch.num_sequences);
    std::copy_n(batch.seq_lens, n, seq_lens_.data());
    if (batch.cu_query_lens != nullptr) {
      std::copy_n(batch.cu_query_lens, n + 1, cu_query_lens_.data());
    } else {
      for (size_t i = 0; i <= n; ++i) cu_query_lens_[i] = static_cast<int32_t>(i);
    }
    num_sequences_ = batch.num_sequences;
    planned_options_ = options;
  }

  std::vector<PcWorkItem> items_;
  std::vector<int32_t> cu_query_lens_;
  std::vector<int32_t> seq_lens_;
  int64_t num_sequences_ = 0;
  PlanOptions planned_options_;  // of the items
  PlanCounts counts_;
};

}  // namespace pagecore
