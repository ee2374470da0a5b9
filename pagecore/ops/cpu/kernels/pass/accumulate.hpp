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
  if (!values.packs() || !pass.choices.by_amx) return false;
  if (!values.takes_digits(pass.rows) ||
      !values.accumulate_digits(*pass.tiles, rows, tile.values, head, use, next, pass.scratch)) {
    values.accumulate(*pass.tiles, rows, tile.values, head, use, next, pass.scratch);
  }
  return true;
}

// Values as products with a packed tile take them.
struct PackedValues {
  TokenRows rows;
  Float type;
  bool together;  // rows can be multiplied together: all of them attend to the same values, or all values are finite
};

// Packs rows of numbers. Returns true if all of them are finite.
inline bool pack_numbers(const Pass& pass, const TokenRows& rows, Float type, const TileUse& use,
                         const NextRows& next) {
  const int64_t dim = pass.args.value.dim;
  float* const panel = pass.scratch.value;
  if constexpr (kHasPairs) {
    if (pass.choices.pairs) return pack_value_pairs(rows, use, dim, reinterpret_cast<uint32_t*>(panel), next);
  }
  return with_float(type, [&]<Float V>() { return pack_values<V>(rows, use, dim, panel, next); });
}

// Packs the values of a tile for accumulate_packed().
inline PackedValues pack_tile_values(const Pass& pass, const Tile& tile, int64_t head, NextRows next) {
  const bool uniform = pass.visible.uniform();
  const TileUse& use = pass.visible.use();
  if (uniform && pass.values.packs()) {
    pass.values.pack_values(tile.values, head, use, next, pass.scratch);
    return {{}, Float::BF16, true};
  }
  const TokenRows rows = pass.values.read(tile.values, head, use, next, pass.scratch.unpacked);
  const Float type = pass.values.type(tile.values);
  const bool finite = pack_numbers(pass, rows, type, use, next);
  return {rows, type, finite || uniform};
}

// Adds the products of rows and packed values.
inline void multiply_packed_values(const Pass& pass, const HeadRows& rows) {
  const int64_t dim = pass.args.value.dim;
  if (!pass.choices.pairs) return multiply_values(rows, dim, pass.scratch);
  if (pass.choices.by_amx) return multiply_value_pairs_amx(*pass.tiles, rows, dim, pass.scratch);
  multiply_value_pairs(*pass.tiles, rows, dim, pass.scratch);
}

// Adds the products of a range of rows. Values with infinities or NaN to which rows attend differently are packed again
// for each row, because 0 * NaN must not reach a row that does not attend to the NaN.
inline void accumulate_packed(const Pass& pass, int64_t head, const RowRange& range, const PackedValues& values) {
  const HeadRows rows = pass.rows_of(head, range);
  if (values.together) return multiply_packed_values(pass, rows);
  for (int64_t row = 0; row < rows.count; ++row) {
    const TileUse use = use_of_row(rows, row, pass.visible.use(), pass.scratch, pass.group);
    pack_numbers(pass, values.rows, values.type, use, {});
    multiply_packed_values(pass, pass.rows_of(head, {range.first + row, range.first + row + 1}));
  }
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
  if (!in_place) return accumulate_packed(pass, head, pass.active_rows(), pack_tile_values(pass, tile, head, next));
  const TokenRows values = pass.values.read(tile.values, head, pass.visible.use(), next, pass.scratch.unpacked);
  accumulate_in_place(pass, pass.rows_of(head), values, pass.values.type(tile.values), next);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
