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
// With few query rows, keys and values are read in place. With many rows, a mask, or a head dim that is not a multiple
// of the vector width, the tile is packed first. Values are always packed for AMX and for tiles in which rows attend to
// different keys.
//
// Keys and values of a quantised cache become bfloat16 first (cache_rows.hpp). Their products are those of a bfloat16
// cache; softmax applies the float32 scales of tokens. Few rows are multiplied with the codes of a few keys at a time,
// by the products of code_products.hpp, or with AMX by those of score_codes_amx.hpp and digits.hpp. Sealed blocks
// become float32; few rows of 16 bits are multiplied with their codes by the products of sealed_products.hpp.
//
// Products with a packed tile give each row the same bits regardless of the other rows, so batch-invariant calls always
// pack.
#pragma once

#include "pagecore/ops/cpu/kernels/cache_rows.hpp"
#include "pagecore/ops/cpu/kernels/products/direct.hpp"
#include "pagecore/ops/cpu/kernels/products/finish.hpp"
#include "pagecore/ops/cpu/kernels/products/packed.hpp"
#include "pagecore/ops/cpu/kernels/products/softmax_rows.hpp"
#include "pagecore/ops/cpu/kernels/tiles/query.hpp"
#include "pagecore/ops/cpu/kernels/tiles/selected.hpp"
#include "pagecore/ops/cpu/kernels/tiles/visibility.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// From this number of rows on, packing a tile costs less than it saves.
constexpr int64_t kPackRows = 16;
static_assert(kPackRows <= kDecodeRows, "AMX must serve every row count that is not packed");

// The state of one pass: an item and head_count of its key heads.
class ItemPass {
 public:
  ItemPass(const AttentionArgs& args, const AttentionBatch& batch, const PcWorkItem& item, int64_t head_begin,
           int64_t head_count, float* memory)
      : args_(args),
        batch_(batch),
        selected_(selected_keys(args, batch, item.sequence, head_begin)),
        item_(selected_.entries == nullptr ? item : selected_item(args, batch, item, selected_)),
        blocks_(args, batch, item.sequence),
        head_begin_(head_begin),
        head_count_(head_count),
        group_(args.query.num_heads / args.key.num_heads),
        rows_(item.query_count * group_),
        value_stride_(padded(args.value.dim)),
        visible_(args, batch, item, group_),
        pairs_(takes_pairs() && multiplies_pairs(args.key) && multiplies_pairs(args.value)),
        keys_(args.key, args.sealed.key, true, batch, head_begin, pairs_, products_with(args.key), takes_integers()),
        values_(args.value, args.sealed.value, false, batch, head_begin, pairs_, products_with(args.value),
                takes_integers()),
        packed_(keys_.packs() || values_.packs() || keys_.products() != CodeProducts::None ||
                values_.products() != CodeProducts::None || batch.invariant || rows_ >= kPackRows ||
                args.mask != nullptr || !is_whole(args.key.dim) || !is_whole(args.value.dim)),
        by_amx_(kHasAmx && pairs_ &&
                (is_plain(args.key) ? !packed_ && batch.from_cache : !batch.invariant && rows_ < kPackRows)),
        query_stride_(pairs_            ? pair_padded(args.key.dim)
                      : scores_floats() ? unpacked_stride(args.key.dim)
                                        : padded(args.key.dim)),
        streams_(batch.sealed_lens != nullptr ? kNatural : order_for(keys_.stored_bytes(), keys_.by_pages())) {
    carve(reinterpret_cast<uintptr_t>(memory), head_count, rows_, args.key.dim, args.value.dim, scratch_);
  }

  void run() {
    start();
    if (pairs_) {
      AmxTiles tiles;
      tiles_ = &tiles;
      visit_keys();
    } else {
      visit_keys();
    }
    finish();
  }

 private:
  // True if the call multiplies pairs of bfloat16. Softmax weights are then rounded to bfloat16, as the output is.
  [[nodiscard]] bool takes_pairs() const {
    return kHasPairs && batch_.multiplies_pairs && batch_.sealed_lens == nullptr && args_.query.type == Float::BF16 &&
           number_type(args_.key) == Float::BF16 && number_type(args_.value) == Float::BF16 &&
           args_.out.type == Float::BF16;
  }

  // Products with the codes of keys or values of few rows. Queries and output of 16 bits are less exact than integers.
  [[nodiscard]] bool multiplies_codes() const { return !batch_.invariant && rows_ <= kCodeRows; }
  [[nodiscard]] bool takes_integers() const {
    return multiplies_codes() && args_.query.type != Float::F32 && args_.out.type != Float::F32;
  }
  [[nodiscard]] CodeProducts products_with(const Cache& cache) const {
    if (!multiplies_codes() || (kHasAmx && takes_pairs())) return CodeProducts::None;
    const bool pairs = takes_pairs() && has_code_pairs(args_.key) && has_code_pairs(args_.value);
    return products_of(cache, pairs, takes_integers());
  }
  [[nodiscard]] bool multiplies_pairs(const Cache& cache) const {
    const CodeProducts products = products_with(cache);
    return products == CodeProducts::None || products == CodeProducts::Pairs;
  }

  [[nodiscard]] bool is_whole(int64_t dim) const { return dim % (pairs_ ? 2 * kLanes : kLanes) == 0; }

  // ---- before the first tile

  void start() {
    clear_sums();
    for (int64_t head = 0; head < head_count_; ++head) load_queries(head);
    if (!by_amx_ || scores_digits()) return;
    for (int64_t head = 0; head < head_count_; ++head) pack_queries(head);
  }

  PC_FORCE_INLINE void clear_sums() {
    const int64_t all = head_count_ * rows_;
    for (int64_t i = 0; i < all; ++i) {
      scratch_.max[i] = scratch_.total_max[i] = -kInfinity;
      scratch_.sum[i] = scratch_.total_sum[i] = 0.0f;
    }
    for (int64_t i = 0; i < all * value_stride_; i += kLanes) store(scratch_.acc + i, Vec{});
    for (int64_t i = 0; i < zero_numbers(args_.key.dim, args_.value.dim); i += kLanes) store(scratch_.zeros + i, Vec{});
  }

  // The factor of the scores is the softmax scale times the head's key scale. Float queries are multiplied by it here,
  // rounded once per number; bfloat16 queries stay as they are, and softmax() multiplies their scores.
  PC_FORCE_INLINE void load_queries(int64_t head) {
    double factor = args_.scale * static_cast<double>(head_value(args_.key_scale, head_begin_ + head, 1.0f));
    if (args_.softcap != 0.0) factor /= args_.softcap;
    scratch_.scale[head] = pairs_ ? static_cast<float>(factor) : 1.0f;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t token = item_.query_begin + row / group_;
      const int64_t query_head = (head_begin_ + head) * group_ + row % group_;
      const int64_t at = (head * rows_ + row) * query_stride_;
      if (pairs_) {
        copy_query(args_, token, query_head, query_pairs() + at, query_stride_);
      } else {
        scale_query(args_, token, query_head, factor, scratch_.query + at, query_stride_);
      }
    }
    if (scores_integers()) make_query_integers(head);
    if (scores_code_pairs()) {
      order_pair_queries(args_.key, query_pairs() + head * rows_ * query_stride_, rows_, scratch_.unpacked);
    }
    if (scores_floats()) order_floats(args_.key, scratch_.query + head * rows_ * query_stride_, query_stride_, rows_);
    if (scores_digits()) {
      const int64_t at = head * rows_;
      takes_integers_ &= pack_query_digits(query_pairs() + at * query_stride_, query_stride_, rows_, args_.key,
                                           query_panel(head), scratch_.integer_rows + at);
    }
  }

  PC_FORCE_INLINE void make_query_integers(int64_t head) {
    const int64_t at = head * rows_;
    const float* const rows = scratch_.query + at * query_stride_;
    takes_integers_ &=
        make_integers(rows, query_stride_, rows_, args_.key, reinterpret_cast<int16_t*>(scratch_.unpacked),
                      query_integers(at), scratch_.integer_rows + at);
  }

  // Packs bfloat16 queries for AMX.
  PC_FORCE_INLINE void pack_queries([[maybe_unused]] int64_t head) {
#if defined(PC_AMX)
    uint16_t* const queries = query_pairs() + head * rows_ * query_stride_;
    if (unpacks_codes()) {
      return pack_code_queries(args_.key, queries, rows_, scratch_.unpacked, query_panel(head));
    }
    pack_query_pairs(queries, query_stride_, rows_, args_.key.dim, query_panel(head));
#endif
  }

  [[nodiscard]] uint16_t* query_pairs() const { return reinterpret_cast<uint16_t*>(scratch_.query); }

  [[nodiscard]] int16_t* query_integers(int64_t row) const {
    return scratch_.query_integers + row * integer_padded(args_.key.dim);
  }

  [[nodiscard]] uint32_t* query_panel(int64_t head) const {
    return scratch_.query_panel + head * query_stride_ / 2 * kDecodeRows;
  }

  // ---- tiles of keys

  // The first item of a tile of queries visits the sinks, then its own keys. Batch-invariant calls fold the sinks by
  // themselves, because the keys that follow them depend on the other rows of the item.
  void visit_keys() {
    if (args_.sink_tokens > 0 && item_.split == 0) [[unlikely]] {
      const PcWorkItem own = item_;
      item_.key_begin = 0;
      item_.key_end = static_cast<int32_t>(visible_.sinks().end);
      visible_.see_sinks(true);
      visit_tiles();
      if (batch_.invariant) fold();
      visible_.see_sinks(false);
      item_ = own;
    }
    visit_tiles();
  }

  void visit_tiles() {
    Tile tiles[2];
    int current = 0;
    int64_t position = item_.key_begin;
    if (position < item_.key_end) locate_tile(position, tiles[0]);
    while (position < item_.key_end) {
      const int64_t next = tiles[current].start + kTileTokens;
      const bool more = next < item_.key_end;
      if (more) locate_tile(next, tiles[1 - current]);
      attend(tiles[current], more ? &tiles[1 - current] : nullptr);
      position = next;
      current = 1 - current;
      if (more && next % kFoldTokens == 0) fold();
    }
  }

  // Keys and values are read in place.
  [[nodiscard]] bool direct() const { return !packed_ && !by_amx_; }

  // Locates a tile, in the order in which it will most likely be visited.
  void locate_tile(int64_t position, Tile& tile) {
    if (selected_.entries == nullptr) {
      locate(args_, blocks_, item_, position, tile);
    } else {
      locate_selected(args_, blocks_, selected_, item_, position, tile);
    }
    if (direct() && tile.first == 0 && tile.last == kTileTokens) set_order(tile, streams_);
  }

  void attend(Tile& tile, const Tile* next) {
    visible_.visit(tile, scratch_);
    if (visible_.empty()) return;
    set_order(tile, visible_.whole() && direct() ? streams_ : kNatural);
    for (int64_t head = 0; head < head_count_; ++head) {
      score(tile, head);
      softmax(tile, head);
    }
    for (int64_t head = 0; head < head_count_; ++head) accumulate_values(tile, head, next);
  }

  [[nodiscard]] bool last(int64_t head) const { return head + 1 == head_count_; }

  // The rows of `head`, to prefetch. With a mask, a block that no row attends to may not exist, so nothing is
  // prefetched.
  [[nodiscard]] NextRows next_rows_at(const CacheRows& rows, const RowOffsets& places, int64_t head) const {
    return args_.mask != nullptr ? NextRows{} : rows.next(places, head);
  }

  // True if the codes of keys are multiplied as float32. order_floats() then orders the queries.
  [[nodiscard]] bool scores_floats() const { return keys_.products() == CodeProducts::Floats; }
  // True if they are multiplied as integers. make_integers() then interleaves the queries of all rows.
  [[nodiscard]] bool scores_integers() const { return keys_.products() == CodeProducts::Integers; }
  // True if they are multiplied as pairs of bfloat16. order_pair_queries() then interleaves the queries of all rows.
  [[nodiscard]] bool scores_code_pairs() const { return keys_.products() == CodeProducts::Pairs; }
  // True if AMX multiplies the codes of keys with digits of queries.
  [[nodiscard]] bool scores_digits() const { return by_amx_ && takes_integers_ && keys_.takes_digits(rows_); }
  // True if AMX takes the codes of keys, unpacked. pack_code_queries() then packs the queries.
  [[nodiscard]] bool unpacks_codes() const { return keys_.packs() && by_amx_; }

  // The rows of a head that are multiplied with the current tile: all that attend to it, and others where queries are
  // interleaved or tiles are read in place.
  [[nodiscard]] RowRange active_rows() const {
    const bool interleaved = scores_integers() || scores_code_pairs();
    return packed_ && !by_amx_ && !interleaved ? visible_.rows() : RowRange{0, rows_};
  }

  // The active rows of a head with their queries, scores and sums.
  [[nodiscard]] HeadRows rows_of(int64_t head) const {
    const RowRange rows = active_rows();
    const int64_t at = head * rows_ + rows.first;
    return {rows.first,
            rows.last - rows.first,
            scratch_.low + rows.first,
            scratch_.high + rows.first,
            scratch_.query + at * query_stride_,
            query_pairs() + at * query_stride_,
            query_stride_,
            query_integers(at),
            scratch_.integer_rows + at,
            scratch_.scores + at * kTileTokens,
            scratch_.weights + at * kTileTokens,
            scratch_.acc + at * value_stride_,
            value_stride_,
            scratch_.factor + at};
  }

  // True if all tokens of a tile are in use and in sealed blocks, one after the other.
  [[nodiscard]] bool is_sealed(const Tile& tile, const RowOffsets& places) const {
    const TileUse& use = visible_.use();
    return places.num_sealed == kTileTokens && !tile.is_selected && use.used == nullptr && use.first == 0 &&
           use.last == kTileTokens;
  }

  void score(const Tile& tile, int64_t head) {
    NextRows values = next_rows_at(values_, tile.values, direct() ? 0 : head);
    if (direct() && !last(head)) values = keys_.next_head(tile.keys, head);
    const HeadRows rows = rows_of(head);
    if (keys_.multiplies_sealed() && is_sealed(tile, tile.keys) &&
        keys_.score_sealed(rows, tile.keys, head, scratch_)) {
      return;
    }
    if (keys_.products() != CodeProducts::None && takes_integers_) {
      return keys_.score_few(rows, tile.keys, head, visible_.use(), values, scratch_);
    }
    if (scores_digits()) {
      return keys_.score_digits(*tiles_, rows, query_panel(head), tile.keys, head, visible_.use(), values, scratch_);
    }
    if (unpacks_codes()) {
      return keys_.score(*tiles_, rows, query_panel(head), tile.keys, head, visible_.use(), values, scratch_);
    }
    if (keys_.packs()) {
      keys_.pack_keys(tile.keys, head, visible_.use(), values, scratch_);
      return multiply_key_pairs(*tiles_, rows, args_.key.dim, scratch_);
    }
    const TokenRows keys = keys_.read(tile.keys, head, visible_.use(), values, scratch_.unpacked);
    const int64_t dim = args_.key.dim;
    if (packed_ && !by_amx_) {
      with_float(keys_.type(), [&]<Float K>() {
        if constexpr (K == Float::BF16 && kHasPairs) {
          if (pairs_) return score_packed_pairs(*tiles_, rows, keys, visible_.use(), values, dim, scratch_);
        }
        score_packed<K>(rows, keys, visible_.use(), values, dim, scratch_);
      });
      return;
    }
    if constexpr (kHasAmx) {
      if (by_amx_) {
        return score_in_place_amx(*tiles_, rows, query_panel(head), keys, visible_.use(), values, dim, scratch_);
      }
    }
    const NextRows next_rows = values;
    if constexpr (kHasPairs) {
      if (pairs_) return score_pairs(rows, keys, next_rows, dim);
    }
    with_float(keys_.type(), [&]<Float K>() { score_rows<K>(rows, keys, next_rows, dim); });
  }

  // Turns scores into weights, and updates the running maximum and sum of each row.
  void softmax(const Tile& tile, int64_t head) {
    const float* key_factors = keys_.factors(tile.keys, head, visible_.use());
    const float* value_factors = values_.factors(tile.values, head, visible_.use());
    // Softmax does not touch memory; prefetch part of the values meanwhile.
    BackgroundPrefetch background(!direct() ? NextRows{} : next_rows_at(values_, tile.values, head), kTileTokens / 2);
    const RowRange rows = active_rows();
    int64_t row = rows.first;
    if (visible_.whole() && args_.softcap == 0.0 && args_.alibi_slopes.data == nullptr) {
      for (; row + kSoftmaxRows <= rows.last; row += kSoftmaxRows) {
        const int64_t at = head * rows_ + row;
        softmax_rows(scratch_.scale[head], key_factors, value_factors, scratch_.scores + at * kTileTokens,
                     pairs_ ? scratch_.weights + at * kTileTokens : nullptr,
                     {scratch_.max + at, scratch_.sum + at, scratch_.factor + at}, background);
      }
    }
    for (; row < rows.last; ++row) {
      const int64_t query = row / group_, at = head * rows_ + row;
      RowScores scores{scratch_.low[row],
                       scratch_.high[row],
                       tile.order,
                       nullptr,
                       scratch_.scale[head],
                       static_cast<float>(args_.softcap),
                       0.0f,
                       0,
                       key_factors,
                       value_factors};
      if (visible_.masked()) scores.keep = scratch_.keep + query * kTileTokens;
      if (args_.alibi_slopes.data != nullptr) {
        scores.slope = head_value(args_.alibi_slopes, (head_begin_ + head) * group_ + row % group_, 0.0f);
        const int64_t anchor =
            bias_anchor(visible_.window(), visible_.position(query), visible_.length(), scores.slope);
        scores.positions = tile.is_selected ? tile.positions : visible_.positions(tile, query);
        scores.bias_begin = static_cast<int32_t>((scores.positions != nullptr ? 0 : tile.start) - anchor);
      }
      scratch_.factor[at] = softmax_row(scores, scratch_.scores + at * kTileTokens,
                                        pairs_ ? scratch_.weights + at * kTileTokens : nullptr, scratch_.max[at],
                                        scratch_.sum[at], background);
    }
  }

  void accumulate_values(const Tile& tile, int64_t head, const Tile* next) {
    const HeadRows rows = rows_of(head);
    const int64_t dim = args_.value.dim;
    const bool in_place = direct() && visible_.uniform();
    NextRows next_keys = next == nullptr ? NextRows{} : next_rows_at(keys_, next->keys, in_place ? 0 : head);
    if (in_place && !last(head)) next_keys = values_.next_head(tile.values, head);
    if (values_.multiplies_sealed() && is_sealed(tile, tile.values) && visible_.uniform() &&
        values_.accumulate_sealed(rows, tile.values, head, scratch_)) {
      return;
    }
    if (values_.products() != CodeProducts::None && visible_.uniform() &&
        values_.accumulate_few(rows, tile.values, head, visible_.use(), next_keys, scratch_)) {
      return;
    }
    if (values_.packs() && visible_.uniform()) {
      if (by_amx_ && values_.takes_digits(rows_) &&
          values_.accumulate_digits(*tiles_, rows, tile.values, head, visible_.use(), next_keys, scratch_)) {
        return;
      }
      if (by_amx_) return values_.accumulate(*tiles_, rows, tile.values, head, visible_.use(), next_keys, scratch_);
      values_.pack_values(tile.values, head, visible_.use(), next_keys, scratch_);
      return multiply_value_pairs(*tiles_, rows, dim, scratch_);
    }
    const TokenRows values = values_.read(tile.values, head, visible_.use(), next_keys, scratch_.unpacked);
    if (!in_place) {
      with_float(values_.type(), [&]<Float V>() {
        if constexpr (V == Float::BF16 && kHasPairs) {
          if (pairs_) {
            return accumulate_packed_pairs(*tiles_, rows, values, visible_, next_keys, dim, group_, by_amx_, scratch_);
          }
        }
        accumulate_packed<V>(rows, values, visible_, next_keys, dim, group_, scratch_);
      });
      return;
    }
    const NextRows next_rows = next_keys;
    const Span span{visible_.use().first, visible_.use().last};
    if constexpr (kHasPairs) {
      if (pairs_) return accumulate_pairs(rows, values, next_rows, span, dim, scratch_.zeros);
    }
    with_float(values_.type(), [&]<Float V>() { accumulate_rows<V>(rows, values, next_rows, span, dim); });
  }

  // ---- running sums

  // Adds the sums since the last fold to the totals.
  void fold() {
    fold_sums(scratch_, head_count_ * rows_, value_stride_, !folded_);
    folded_ = true;
  }

  // Stores each row: the output and its lse, or the partial sums of a split.
  void finish() {
    if (folded_) fold();
    const float* row_max = folded_ ? scratch_.total_max : scratch_.max;
    const float* row_sum = folded_ ? scratch_.total_sum : scratch_.sum;
    const float* acc = folded_ ? scratch_.total_acc : scratch_.acc;
    for (int64_t i = 0; i < head_count_ * rows_; ++i) {
      const int64_t kv_head = head_begin_ + i / rows_;
      const int64_t query = i % rows_ / group_;
      const int64_t head = kv_head * group_ + i % rows_ % group_;
      const float* row = acc + i * value_stride_;
      if (item_.num_splits == 1) {
        finish_row(args_, head_options(args_, head, kv_head), item_.query_begin + query, head, visible_.position(query),
                   visible_.length(), row_max[i], row_sum[i], row);
      } else {
        store_partial(batch_, (item_.partial + query) * args_.query.num_heads + head, row_max[i], row_sum[i], row,
                      value_stride_);
      }
    }
  }

  const AttentionArgs& args_;
  const AttentionBatch& batch_;
  SelectedKeys selected_;  // of the pass's only head; absent: all keys
  PcWorkItem item_;        // with a selection, its keys count in the head's list
  SequenceBlocks blocks_;
  int64_t head_begin_, head_count_;
  int64_t group_;
  int64_t rows_;  // of one head
  int64_t value_stride_;
  Visibility visible_;
  bool pairs_;  // queries, keys, values and output are bfloat16, multiplied in pairs
  CacheRows keys_;
  CacheRows values_;
  bool packed_;                 // every tile is packed first
  bool takes_integers_ = true;  // queries that are multiplied as integers can be
  bool by_amx_;                 // AMX reads keys in place, or unpacked; values are packed
  int64_t query_stride_;
  const Order& streams_;
  Scratch scratch_;
  AmxTiles* tiles_ = nullptr;
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
