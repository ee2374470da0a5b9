// Attention of one work item: the queries of one tile over the keys of the item, for the heads of one pass.
//
//   for each tile of 64 keys                 offsets once, from the block table
//     for each key head
//       scores   [rows, 64]
//       softmax  [rows, 64]                  one online-softmax step per row
//     for each key head
//       values   [rows, dim]
//
// All heads finish with the keys of a tile before any starts with its values, so that whole blocks are read in memory
// order. A row is one (query, head of the group) pair, with queries outermost.
//
// Keys and values of a quantised cache become bfloat16 first (cache_rows.hpp). Their products are those of a bfloat16
// cache; softmax applies the float32 scales of tokens. Few rows are multiplied with the codes of a few keys at a time,
// by the products of code_products.hpp, or with AMX by those of score_codes_amx.hpp and digits.hpp. Sealed blocks
// become float32; few rows of 16 bits are multiplied with their codes by the products of sealed_products.hpp.
#pragma once

#include "pagecore/ops/cpu/kernels/pass/blocks.hpp"
#include "pagecore/ops/cpu/kernels/pass/queries.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Visits the tiles of a pass.
class ItemPass {
 public:
  ItemPass(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item, int64_t head_begin,
           int64_t head_count, float* memory)
      : pass_(args, batch, item, head_begin, head_count, memory),
        streams_(batch.sealed_lens != nullptr ? kNatural
                                              : order_for(pass_.keys.stored_bytes(), pass_.keys.by_pages())) {}

  void run() {
    clear_sums();
    load_queries(pass_);
    if (pass_.choices.pairs) {
      AmxTiles tiles;
      pass_.tiles = &tiles;
      visit_keys();
    } else {
      visit_keys();
    }
    finish();
  }

 private:
  PC_FORCE_INLINE void clear_sums() {
    const Scratch& scratch = pass_.scratch;
    const int64_t all = num_sums();
    for (int64_t i = 0; i < all; ++i) {
      scratch.max[i] = scratch.total_max[i] = -kInfinity;
      scratch.sum[i] = scratch.total_sum[i] = 0.0f;
    }
    const int64_t zeros = zero_numbers(pass_.args.key.dim, pass_.args.value.dim);
    for (int64_t i = 0; i < all * pass_.value_stride; i += kLanes) store(scratch.acc + i, Vec{});
    for (int64_t i = 0; i < zeros; i += kLanes) store(scratch.zeros + i, Vec{});
  }

  // The first item of a tile of queries visits the sinks, then its own keys. Batch-invariant calls fold the sinks by
  // themselves, because the keys that follow them depend on the other rows of the item.
  void visit_keys() {
    if (pass_.args.sink_tokens > 0 && pass_.item.split == 0) [[unlikely]] {
      const PcWorkItem own = pass_.item;
      pass_.item.key_begin = 0;
      pass_.item.key_end = static_cast<int32_t>(pass_.visible.sinks().end);
      pass_.visible.see_sinks(true);
      visit_tiles();
      if (pass_.batch.invariant) fold();
      pass_.visible.see_sinks(false);
      pass_.item = own;
    }
    visit_tiles();
  }

  void visit_tiles() {
    const int64_t end = pass_.item.key_end;
    Tile tiles[2];
    int current = 0;
    int64_t position = pass_.item.key_begin;
    if (position < end) locate_tile(position, tiles[0]);
    while (position < end) {
      const int64_t next = tiles[current].start + kTileTokens;
      const bool more = next < end;
      if (more) locate_tile(next, tiles[1 - current]);
      attend(tiles[current], more ? &tiles[1 - current] : nullptr);
      position = next;
      current = 1 - current;
      if (more && next % kFoldTokens == 0) fold();
    }
  }

  // Locates a tile, in the order in which it will most likely be visited.
  void locate_tile(int64_t position, Tile& tile) {
    if (pass_.selected.entries == nullptr) {
      locate(pass_.args, pass_.blocks, pass_.item, position, tile);
    } else {
      locate_selected(pass_.args, pass_.blocks, pass_.selected, pass_.item, position, tile);
    }
    if (pass_.choices.in_place() && tile.first == 0 && tile.last == kTileTokens) set_order(tile, streams_);
  }

  void attend(Tile& tile, const Tile* next) {
    Visibility& visible = pass_.visible;
    visible.visit(tile, pass_.scratch);
    if (visible.empty()) return;
    set_order(tile, visible.whole() && pass_.choices.in_place() ? streams_ : kNatural);
    if (takes_blocks(pass_)) return attend_blocks(pass_, tile, next);
    for (int64_t head = 0; head < pass_.head_count; ++head) {
      score(pass_, tile, head);
      softmax(pass_, tile, head);
    }
    for (int64_t head = 0; head < pass_.head_count; ++head) accumulate(pass_, tile, head, next);
  }

  // ---- running sums

  [[nodiscard]] int64_t num_sums() const { return pass_.head_count * pass_.rows; }

  // Adds the sums since the last fold to the totals.
  void fold() {
    fold_sums(pass_.scratch, num_sums(), pass_.value_stride, !folded_);
    folded_ = true;
  }

  // Stores each row: the output and its lse, or the partial sums of a split.
  void finish() {
    if (folded_) fold();
    const Scratch& scratch = pass_.scratch;
    const float* row_max = folded_ ? scratch.total_max : scratch.max;
    const float* row_sum = folded_ ? scratch.total_sum : scratch.sum;
    const float* acc = folded_ ? scratch.total_acc : scratch.acc;
    for (int64_t i = 0; i < num_sums(); ++i) finish_sum(i, row_max[i], row_sum[i], acc + i * pass_.value_stride);
  }

  void finish_sum(int64_t i, float row_max, float row_sum, const float* acc) {
    const AttentionArgs& args = pass_.args;
    const PcWorkItem& item = pass_.item;
    const int64_t rows = pass_.rows, group = pass_.group;
    const int64_t kv_head = pass_.head_begin + i / rows, query = i % rows / group;
    const int64_t head = kv_head * group + i % rows % group;
    if (item.num_splits == 1) {
      finish_row(args, head_options(args, head, kv_head), item.query_begin + query, head, pass_.visible.position(query),
                 pass_.visible.length(), row_max, row_sum, acc);
    } else {
      store_partial(pass_.batch, (item.partial + query) * args.query.num_heads + head, row_max, row_sum, acc,
                    pass_.value_stride);
    }
  }

  Pass pass_;
  const Order& streams_;
  bool folded_ = false;
};

inline void attend_item(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item,
                        int64_t head_begin, int64_t head_count, float* scratch) {
  ItemPass(args, batch, item, head_begin, head_count, scratch).run();
}

// The same without products of pairs of bfloat16.
inline void attend_without_pairs(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item,
                                 int64_t head_begin, int64_t head_count, float* scratch) {
  AttentionBatch without = batch;
  without.multiplies_pairs = false;
  attend_item(args, without, item, head_begin, head_count, scratch);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
