// The weighted sums of the values of one tile and one head.
#pragma once

#include "pagecore/ops/cpu/kernels/pass/pass.hpp"
#include "pagecore/ops/cpu/kernels/products/direct.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Sums of the codes of quantised values, to which all rows attend. Returns false, having changed nothing, if the values
// have to be read as numbers.
inline bool accumulate_codes(const Pass& pass, const Tile& tile, int64_t head, const Tile* next_tile,
                             const NextRows& next) {
  const CacheRows& values = pass.values;
  const HeadRows rows = pass.rows_of(head);
  const TileUse& use = pass.visible.use();
  if (values.multiplies_sealed() && pass.is_sealed(tile, tile.values) &&
      values.accumulate_sealed(rows, tile.values, head,
                               !pass.is_last(head)    ? values.sealed_ahead(&tile.values, head + 1)
                               : next_tile == nullptr ? values.sealed_ahead(nullptr, 0)
                                                      : pass.keys.sealed_ahead(&next_tile->keys, 0),
                               pass.scratch)) {
    return true;
  }
  if (values.products() != CodeProducts::None) {
    return values.accumulate_few(rows, tile.values, head, use, next, pass.scratch);
  }
  if (!values.packs()) return false;
  if (!pass.choices.by_amx) {
    values.pack_values(tile.values, head, use, next, pass.scratch);
    multiply_value_pairs(*pass.tiles, rows, pass.args.value.dim, pass.scratch);
  } else if (!values.takes_digits(pass.rows) ||
             !values.accumulate_digits(*pass.tiles, rows, tile.values, head, use, next, pass.scratch)) {
    values.accumulate(*pass.tiles, rows, tile.values, head, use, next, pass.scratch);
  }
  return true;
}

// Sums of a tile that is packed first.
inline void accumulate_tile(const Pass& pass, const HeadRows& rows, const TokenRows& values, Float type,
                            const NextRows& next) {
  const int64_t dim = pass.args.value.dim;
  if constexpr (kHasPairs) {
    if (pass.choices.pairs) {
      return accumulate_packed_pairs(*pass.tiles, rows, values, pass.visible, next, dim, pass.group,
                                     pass.choices.by_amx, pass.scratch);
    }
  }
  with_float(type,
             [&]<Float V>() { accumulate_packed<V>(rows, values, pass.visible, next, dim, pass.group, pass.scratch); });
}

// Sums of values in place; all rows attend to the same ones.
inline void accumulate_in_place(const Pass& pass, const HeadRows& rows, const TokenRows& values, Float type,
                                const NextRows& next) {
  const int64_t dim = pass.args.value.dim;
  const Span span{pass.visible.use().first, pass.visible.use().last};
  if constexpr (kHasPairs) {
    if (pass.choices.pairs) return accumulate_pairs(rows, values, next, span, dim, pass.scratch.zeros);
  }
  with_float(type, [&]<Float V>() { accumulate_rows<V>(rows, values, next, span, dim); });
}

// Adds the weighted values of `head` to the sums of its rows. The rows that are read next, in `next_tile` after the
// last head, are prefetched meanwhile.
inline void accumulate(const Pass& pass, const Tile& tile, int64_t head, const Tile* next_tile) {
  const bool uniform = pass.visible.uniform(), in_place = pass.choices.in_place() && uniform;
  NextRows next =
      next_tile == nullptr ? NextRows{} : pass.next_rows_at(pass.keys, next_tile->keys, in_place ? 0 : head);
  if (in_place && !pass.is_last(head)) next = pass.values.next_head(tile.values, head);
  if (uniform && accumulate_codes(pass, tile, head, next_tile, next)) return;
  const TokenRows values = pass.values.read(tile.values, head, pass.visible.use(), next, pass.scratch.unpacked);
  const HeadRows rows = pass.rows_of(head);
  const Float type = pass.values.type(tile.values);
  if (in_place) return accumulate_in_place(pass, rows, values, type, next);
  accumulate_tile(pass, rows, values, type, next);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
