// The scores of one tile and one head.
#pragma once

#include "pagecore/ops/cpu/kernels/pass/pass.hpp"
#include "pagecore/ops/cpu/kernels/products/direct.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Scores of the codes of quantised keys.
inline void score_codes(const Pass& pass, const Tile& tile, int64_t head, const NextRows& next) {
  const HeadRows rows = pass.rows_of(head);
  const TileUse& use = pass.visible.use();
  if (pass.score_path == ScorePath::Codes) return pass.keys.score_few(rows, tile.keys, head, use, next, pass.scratch);
  if (pass.score_path == ScorePath::PackedCodes) {
    pass.keys.pack_keys(tile.keys, head, use, next, pass.scratch);
    return multiply_key_pairs(*pass.tiles, rows, pass.args.key.dim, pass.scratch);
  }
  const uint32_t* const panel = pass.query_panel(head);
  if (pass.score_path == ScorePath::AmxDigits) {
    return pass.keys.score_digits(*pass.tiles, rows, panel, tile.keys, head, use, next, pass.scratch);
  }
  pass.keys.score(*pass.tiles, rows, panel, tile.keys, head, use, next, pass.scratch);
}

// Scores of keys that are read as numbers.
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
    if (pass.score_path == ScorePath::PackedPairs) {
      return score_packed_pairs(*pass.tiles, rows, keys, use, next, dim, pass.scratch);
    }
  }
  with_float(pass.keys.type(tile.keys), [&]<Float K>() {
    if (pass.score_path == ScorePath::Rows) return score_rows<K>(rows, keys, next, dim);
    score_packed<K>(rows, keys, use, next, dim, pass.scratch);
  });
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
  if (reads_codes(pass.score_path)) return score_codes(pass, tile, head, next);
  score_numbers(pass, tile, head, next);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
