// One pass: the queries of a work item over its keys, for head_count of its key heads.
#pragma once

#include "pagecore/ops/cpu/kernels/pass/choices.hpp"
#include "pagecore/ops/cpu/kernels/tiles/selected.hpp"
#include "pagecore/ops/cpu/kernels/tiles/visibility.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Ways of computing the scores of a tile. Codes are those of quantised keys.
enum class ScorePath : uint8_t {
  Rows,         // of keys read in place
  PairRows,     // the same, as pairs of bfloat16
  AmxRows,      // the same, with AMX
  Packed,       // of a packed tile, as float32
  PackedPairs,  // the same, as pairs of bfloat16
  PackedCodes,  // the same, of codes packed as pairs of bfloat16
  Codes,        // of the codes, with code_products.hpp
  AmxCodes,     // of the codes, unpacked, with AMX
  AmxDigits,    // of the codes and digits of queries, with AMX
};

inline bool is_packed(ScorePath path) { return path >= ScorePath::Packed && path <= ScorePath::PackedCodes; }
inline bool reads_codes(ScorePath path) { return path >= ScorePath::PackedCodes; }

// The state that the steps of a pass share.
struct Pass {
  Pass(const AttentionArgs& of_args, const AttentionBatch& of_batch, const PcWorkItem& of_item, int64_t begin,
       int64_t count, float* memory)
      : args(of_args),
        batch(of_batch),
        selected(selected_keys(args, batch, of_item.sequence, begin)),
        item(selected.entries == nullptr ? of_item : selected_item(args, batch, of_item, selected)),
        blocks(args, batch, item.sequence),
        head_begin(begin),
        head_count(count),
        group(args.query.num_heads / args.key.num_heads),
        rows(item.query_count * group),
        value_stride(padded(args.value.dim)),
        choices(args, batch, rows),
        keys(args.key, args.sealed.key, true, batch, begin, choices.pairs, choices.key_products, choices.integers),
        values(args.value, args.sealed.value, false, batch, begin, choices.pairs, choices.value_products,
               choices.integers),
        visible(args, batch, item, group) {
    carve(reinterpret_cast<uintptr_t>(memory), count, rows, args.key.dim, args.value.dim, scratch);
  }

  // Memory of the queries: rows of float32 or of bfloat16; panels of them for AMX; rows of integers.
  [[nodiscard]] float* query_floats(int64_t head) const { return scratch.query + head * rows * choices.query_stride; }
  [[nodiscard]] uint16_t* query_pairs(int64_t head) const {
    return reinterpret_cast<uint16_t*>(scratch.query) + head * rows * choices.query_stride;
  }
  [[nodiscard]] uint32_t* query_panel(int64_t head) const {
    return scratch.query_panel + head * choices.query_stride / 2 * kDecodeRows;
  }
  [[nodiscard]] int16_t* query_integers(int64_t row) const {
    return scratch.query_integers + row * integer_padded(args.key.dim);
  }

  [[nodiscard]] bool is_last(int64_t head) const { return head + 1 == head_count; }

  // The rows of a head that are multiplied with the current tile: all that attend to it, and others where queries are
  // interleaved or tiles are read in place.
  [[nodiscard]] RowRange active_rows() const {
    const CodeProducts products = choices.key_products;
    const bool interleaved = products == CodeProducts::Integers || products == CodeProducts::Pairs;
    return choices.packed && !choices.by_amx && !interleaved ? visible.rows() : RowRange{0, rows};
  }

  // Rows of a head with their queries, scores and sums: those in a range, or the active ones.
  [[nodiscard]] HeadRows rows_of(int64_t head) const { return rows_of(head, active_rows()); }
  [[nodiscard]] HeadRows rows_of(int64_t head, const RowRange& range) const {
    const int64_t at = head * rows + range.first;
    return {range.first,
            range.last - range.first,
            scratch.low + range.first,
            scratch.high + range.first,
            query_floats(head) + range.first * choices.query_stride,
            query_pairs(head) + range.first * choices.query_stride,
            choices.query_stride,
            query_integers(at),
            scratch.integer_rows + at,
            scratch.scores + at * kTileTokens,
            scratch.weights + at * kTileTokens,
            scratch.acc + at * value_stride,
            value_stride,
            scratch.factor + at};
  }

  // The rows of `head`, to prefetch. With a mask, a block that no row attends to may not exist, so nothing is
  // prefetched.
  [[nodiscard]] NextRows next_rows_at(const CacheRows& of, const RowOffsets& places, int64_t head) const {
    return args.mask != nullptr ? NextRows{} : of.next(places, head);
  }

  // True if all tokens of a tile are in use and in sealed blocks, one after the other.
  [[nodiscard]] bool is_sealed(const Tile& tile, const RowOffsets& places) const {
    const TileUse& use = visible.use();
    return places.num_sealed == kTileTokens && !tile.is_selected && use.used == nullptr && use.first == 0 &&
           use.last == kTileTokens;
  }

  const AttentionArgs& args;
  const AttentionBatch& batch;
  SelectedKeys selected;  // of the pass's only head; absent: all keys
  PcWorkItem item;        // with a selection, its keys count in the head's list
  SequenceBlocks blocks;
  int64_t head_begin, head_count;
  int64_t group;
  int64_t rows;  // of one head
  int64_t value_stride;
  PassChoices choices;
  CacheRows keys;
  CacheRows values;
  Visibility visible;
  ScorePath score_path = ScorePath::Rows;  // known once the queries are loaded
  Scratch scratch;
  AmxTiles* tiles = nullptr;
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
