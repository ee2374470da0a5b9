// The packed rows of a CTA of the latent kernels, and the end of a row: its factors, its target, and the pieces of a
// batch-invariant row.
#pragma once

#include "cuda_src/abi/latent.h"
#include "cuda_src/abi/plan.h"
#include "cuda_src/attention/softmax/splits.cuh"

namespace pagecore {

// The grid is (row tiles, workers): CTAs that read the same rows of the cache start one after the other, so that they
// share them through the L2.

// The packed rows of an item, query * heads + head, that a CTA processes: `capacity` from first_row on.
struct LatentBlock {
  static constexpr int kv = 0;  // the only key head
  int heads;
  int first_row;
  int capacity;

  PC_MEMBER int num_rows(const PcWorkItem& item) const {
    return clamp(item.query_count * heads - first_row, 0, capacity);
  }
  // The counter of a partial row.
  PC_MEMBER static pc_int64 counter(const PcAttentionParams&, int row) {
    return static_cast<pc_int64>(row) * pc_num_blocks_x() + pc_block_x();
  }
  PC_MEMBER int query(int row) const { return (first_row + row) / heads; }
  PC_MEMBER int head(int row) const { return (first_row + row) % heads; }
};

// The first of the partial rows that a worker of a batch-invariant plan has to itself, after those of splits.
PC_DEVICE pc_int64 first_latent_fold(const PcAttentionParams& p) {
  const int query_tile = max_of(kPromptRows / p.num_query_heads, 1);
  return p.num_partial_rows - static_cast<pc_int64>(pc_num_blocks_y() - pc_block_y()) * query_tile;
}

// Sets rows after the queries of the last sequence to 0, and their lse to -infinity. The CTAs share the rows.
PC_DEVICE void clear_latent_padding(const PcAttentionParams& p) {
  const int first = pc_block_y() * pc_num_blocks_x() + pc_block_x();
  for (int row = first_padding_row(p) + first; row < p.num_tokens; row += pc_num_blocks_x() * pc_num_blocks_y()) {
    for (int head = 0; head < p.num_query_heads; ++head) {
      const pc_int64 at = row_offset(p.out, row, head);
      for (int d = pc_thread(); d < p.value_dim; d += pc_num_threads())
        store_floats<1>(p.out_type, p.out.data, at + d, {0.0f});
      if (pc_thread() == 0) store_lse(p, row, head, -pc_infinity());
    }
  }
}

// A piece of an item, whose keys are summed in pieces of fold_tokens.
struct LatentPiece {
  bool folds;  // the item has more than one piece
  bool last;
  int index;
};

// The end of a row after the last key of an item or of a piece. With `folds`, a piece is added to the sum of the pieces
// before it, as JoinedRow does: largest lse and sum are in shared memory, the values in the worker's own partial rows,
// of which a thread reads and writes its own elements only.
struct LatentRowEnd {
  ResultRow target;
  pc_int64 kept;  // element of partial_out with the values of the pieces before
  float lse;
  float scale;                    // of the values of the piece
  float weight, rescale, factor;  // of a piece, of those before it, and of their sum
  bool folds, first;

  // `row`: of the CTA. `top`: the largest score, factor included; `sum` is relative to it. `sums`: [2][num_rows] pairs,
  // read by all threads that have the row and written by the one that `stores`; a barrier of the block must follow
  // before the next piece ends.
  PC_MEMBER LatentRowEnd(const PcLatentParams& params, const LatentBlock& block, const PcWorkItem& item,
                         const Splits& splits, const LatentPiece& piece, int row, float top, float sum,
                         const Shared<float>& sums, int num_rows, bool stores)
      : folds(piece.folds), first(piece.index == 0) {
    const PcAttentionParams& p = params.attention;
    const int query = block.query(row), head = block.head(row);
    const bool whole = splits.count == 1 && piece.last;
    const float sink = whole ? load_sink(p, head) : -pc_infinity();  // fault: latent_sinks_in_every_split
    const RowEnd end = end_row(top, sum, folds ? -pc_infinity() : sink);
    scale = end.factor * params.value_factor;
    lse = end.lse;
    target = result_row(p, item, splits, query, head);
    kept = ((first_latent_fold(p) + query) * p.num_query_heads + head) * p.value_dim;
    weight = factor = 1.0f;
    rescale = 0.0f;
    if (!folds) return;
    add_piece(sums, 2 * (piece.index % 2 * num_rows + row), 2 * ((piece.index + 1) % 2 * num_rows + row), piece.last,
              sink, stores);
    if (!piece.last) target = {PC_FLOAT32, p.partial_out, kept, 0, 0};
  }

  PC_MEMBER bool has_before() const { return folds && !first; }
  PC_MEMBER float value(float x, float before) const {
    return folds ? pc_fma(weight, x * scale, before * rescale) * factor : x * scale;
  }

 private:
  PC_MEMBER void add_piece(const Shared<float>& sums, int own, int before, bool last, float sink, bool stores) {
    const float top = first ? -pc_infinity() : sums.load(before), sum = first ? 0.0f : sums.load(before + 1);
    const float highest = pc_max(top, lse), origin = finite_or_zero(highest);
    weight = pc_exp2((lse - origin) * kLog2OfE);
    rescale = pc_exp2((top - origin) * kLog2OfE);
    const float total = pc_fma(sum, rescale, weight);
    if (last) {
      const RowEnd end = end_row(highest * kLog2OfE, total, sink);
      factor = end.factor;
      lse = end.lse;
    } else if (stores) {
      sums.store(own, highest);
      sums.store(own + 1, total);
    }
  }
};

}  // namespace pagecore
