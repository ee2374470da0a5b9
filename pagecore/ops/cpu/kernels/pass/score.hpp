// The scores of one tile and one head.
#pragma once

#include "pagecore/ops/cpu/kernels/pass/pass.hpp"
#include "pagecore/ops/cpu/kernels/products/direct.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Packs the keys of a tile for multiply_packed_keys().
inline void pack_tile_keys(const Pass& pass, const Tile& tile, int64_t head, NextRows next) {
  const TileUse& use = pass.visible.use();
  const Scratch& scratch = pass.scratch;
  if (pass.score_path == ScorePath::PackedCodes) return pass.keys.pack_keys(tile.keys, head, use, next, scratch);
  const int64_t dim = pass.args.key.dim;
  const TokenRows keys = pass.keys.read(tile.keys, head, use, next, scratch.unpacked);
  if constexpr (kHasPairs) {
    if (pass.score_path == ScorePath::PackedPairs) {
      return pack_key_pairs(keys, use, dim, reinterpret_cast<uint32_t*>(scratch.key), next);
    }
  }
  with_float(pass.keys.type(tile.keys), [&]<Float K>() { pack_keys<K>(keys, use, dim, scratch.key, next); });
}

// Scores of keys that are packed.
inline void multiply_packed_keys(const Pass& pass, const HeadRows& rows) {
  if (pass.choices.pairs) return multiply_key_pairs(*pass.tiles, rows, pass.args.key.dim, pass.scratch);
  multiply_keys(rows, pass.args.key.dim, pass.scratch);
}

// Scores of the codes of quantised keys.
inline void score_codes(const Pass& pass, const Tile& tile, int64_t head, const NextRows& next) {
  const HeadRows rows = pass.rows_of(head);
  const TileUse& use = pass.visible.use();
  if (pass.score_path == ScorePath::Codes) return pass.keys.score_few(rows, tile.keys, head, use, next, pass.scratch);
  const uint32_t* const panel = pass.query_panel(head);
  if (pass.score_path == ScorePath::AmxDigits) {
    return pass.keys.score_digits(*pass.tiles, rows, panel, tile.keys, head, use, next, pass.scratch);
  }
  pass.keys.score(*pass.tiles, rows, panel, tile.keys, head, use, next, pass.scratch);
}

// Scores of keys that are read as numbers, in place.
inline void score_numbers(const Pass& pass, const Tile& tile, int64_t head, NextRows next) {
  const HeadRows rows = pass.rows_of(head);
  const TileUse& use = pass.visible.use();
  const int64_t dim = pass.args.key.dim;
  const TokenRows keys = pass.keys.read(tile.keys, head, use, next, pass.scratch.unpacked);
  if constexpr (kHasAmx) {
    if (pass.score_path == ScorePath::AmxRows) {
      const uint32_t* const panel = pass.query_panel(head);
      return score_in_place_amx(*pass.tiles, rows, panel, keys, use, next, dim, pass.scratch);
    }
  }
  if constexpr (kHasPairs) {
    if (pass.score_path == ScorePath::PairRows) return score_pairs(rows, keys, next, dim);
  }
  with_float(pass.keys.type(tile.keys), [&]<Float K>() { score_rows<K>(rows, keys, next, dim); });
}

// Scores of the rows of `head`. The rows that are read next are prefetched meanwhile.
inline void score(const Pass& pass, const Tile& tile, int64_t head) {
  const bool in_place = pass.choices.in_place();
  if (pass.keys.multiplies_sealed() && pass.is_sealed(tile, tile.keys) &&
      pass.keys.score_sealed(
          pass.rows_of(head), tile.keys, head,
          pass.is_last(head) ? pass.values.sealed_ahead(&tile.values, 0) : pass.keys.sealed_ahead(&tile.keys, head + 1),
          pass.scratch)) {
    return;
  }
  const NextRows next = in_place && !pass.is_last(head)
                            ? pass.keys.next_head(tile.keys, head)
                            : pass.next_rows_at(pass.values, tile.values, in_place ? 0 : head);
  if (is_packed(pass.score_path)) {
    pack_tile_keys(pass, tile, head, next);
    return multiply_packed_keys(pass, pass.rows_of(head));
  }
  if (reads_codes(pass.score_path)) return score_codes(pass, tile, head, next);
  score_numbers(pass, tile, head, next);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
