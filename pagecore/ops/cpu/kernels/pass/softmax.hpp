// Softmax of one tile and one head.
#pragma once

#include "pagecore/ops/cpu/kernels/pass/pass.hpp"
#include "pagecore/ops/cpu/kernels/products/finish.hpp"
#include "pagecore/ops/cpu/kernels/products/softmax_rows.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// The factors of the tokens of a tile; null: 1.
struct TokenFactors {
  const float* keys;
  const float* values;
};

// Softmax of one row, with all that may modify its scores.
PC_FORCE_INLINE void softmax_head_row(Pass& pass, const Tile& tile, int64_t head, int64_t row,
                                      const TokenFactors& factors, BackgroundPrefetch& background) {
  const AttentionArgs& args = pass.args;
  const Scratch& scratch = pass.scratch;
  Visibility& visible = pass.visible;
  const int64_t query = row / pass.group, at = head * pass.rows + row;
  RowScores scores{scratch.low[row],
                   scratch.high[row],
                   tile.order,
                   nullptr,
                   scratch.scale[head],
                   static_cast<float>(args.softcap),
                   0.0f,
                   0,
                   factors.keys,
                   factors.values};
  if (visible.masked()) scores.keep = scratch.keep + query * kTileTokens;
  if (args.alibi_slopes.data != nullptr) {
    scores.slope = head_value(args.alibi_slopes, (pass.head_begin + head) * pass.group + row % pass.group, 0.0f);
    const int64_t anchor = bias_anchor(visible.window(), visible.position(query), visible.length(), scores.slope);
    scores.positions = tile.is_selected ? tile.positions : visible.positions(tile, query);
    scores.bias_begin = static_cast<int32_t>((scores.positions != nullptr ? 0 : tile.start) - anchor);
  }
  scratch.factor[at] = softmax_row(scores, scratch.scores + at * kTileTokens,
                                   pass.choices.pairs ? scratch.weights + at * kTileTokens : nullptr, scratch.max[at],
                                   scratch.sum[at], background);
}

// Takes kRows rows at a time from `row` on, to all of whose keys they attend; returns the first row that is left.
template <int kRows>
PC_FORCE_INLINE int64_t softmax_whole_rows(const Pass& pass, int64_t head, int64_t row, int64_t last,
                                           const TokenFactors& factors, BackgroundPrefetch& background) {
  const Scratch& scratch = pass.scratch;
  for (; row + kRows <= last; row += kRows) {
    const int64_t at = head * pass.rows + row;
    if (kRows == kManyRows && pass.tiles != nullptr) pass.tiles->keep_awake();
    softmax_rows<kRows>(scratch.scale[head], factors.keys, factors.values, scratch.scores + at * kTileTokens,
                        pass.choices.pairs ? scratch.weights + at * kTileTokens : nullptr,
                        {scratch.max + at, scratch.sum + at, scratch.factor + at}, background);
  }
  return row;
}

// Turns the scores of a range of rows of `head` into weights, and updates the running maximum and sum of each row.
inline void softmax(Pass& pass, const Tile& tile, int64_t head, const RowRange& rows, const TokenFactors& factors,
                    const NextRows& next) {
  BackgroundPrefetch background(next, kTileTokens / 2);
  int64_t row = rows.first;
  if (pass.visible.whole() && pass.args.softcap == 0.0 && pass.args.alibi_slopes.data == nullptr) {
    row = softmax_whole_rows<kManyRows>(pass, head, row, rows.last, factors, background);
    row = softmax_whole_rows<kFewSoftmaxRows>(pass, head, row, rows.last, factors, background);
  }
  for (; row < rows.last; ++row) softmax_head_row(pass, tile, head, row, factors, background);
}

inline TokenFactors factors_of(Pass& pass, const Tile& tile, int64_t head) {
  const TileUse& use = pass.visible.use();
  return {pass.keys.factors(tile.keys, head, use), pass.values.factors(tile.values, head, use)};
}

// The same for the active rows. Softmax does not touch memory: part of the values is prefetched meanwhile.
inline void softmax(Pass& pass, const Tile& tile, int64_t head) {
  const NextRows next = pass.choices.in_place() ? pass.next_rows_at(pass.values, tile.values, head) : NextRows{};
  softmax(pass, tile, head, pass.active_rows(), factors_of(pass, tile, head), next);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
