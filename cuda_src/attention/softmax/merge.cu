// Merge of two partial attention results over different keys, row by row; a row is one head of one token.
//
//   row     | unit | unit | ...     a unit is 16 bytes, or less if an address, a stride or the row's length requires it
//   lanes   1 << lanes_shift lanes of one warp, at most one for each unit; they take units in turn
//
// The lanes of a row are in one warp, so that all of them have read the row's two lse before one of them writes the
// merged lse, which may replace one of these. A unit is written by the lane that has read it, so that the output may be
// one of the inputs. Both inputs are read once and the output is written once.
#include "cuda_src/abi/moves.h"
#include "cuda_src/device/units.cuh"

namespace pagecore {

// Weights of the two parts of a row, and the merged lse.
struct MergeWeights {
  float a;
  float b;
  float lse;
};

// An lse as the weight of its part: +inf is what FlashAttention reports for a query without keys.
PC_DEVICE float log_weight(float lse) { return lse == pc_infinity() ? -pc_infinity() : lse; }

PC_DEVICE MergeWeights merge_weights(float lse_a, float lse_b) {
  const float a = log_weight(lse_a), b = log_weight(lse_b);
  const float top = a > b ? a : b;
  if (a == -pc_infinity() && b == -pc_infinity()) return {0.0f, 0.0f, top};
  const float part_a = pc_exp2((a - top) * kLog2OfE), part_b = pc_exp2((b - top) * kLog2OfE), total = part_a + part_b;
  return {part_a / total, part_b / total, top + pc_log2(total) * kLogOf2};
}

template <typename T, int Count>
PC_DEVICE Unit<T, Count> merge_units(const Unit<T, Count>& a, const Unit<T, Count>& b, const MergeWeights& weights) {
  float values[Count];
  PC_UNROLL
  for (int i = 0; i < Count; ++i) {
    // A part of weight 0 is not read as a number: it may be NaN.
    const float part = weights.a != 0.0f ? element(a, i) * weights.a : 0.0f;
    values[i] = weights.b != 0.0f ? pc_fma(element(b, i), weights.b, part) : part;
  }
  return unit_of<T>(values);
}

PC_DEVICE pc_int64 offset_in(const PcRows& rows, int token, int head) {
  return token * rows.token_stride + head * rows.head_stride;
}

PC_DEVICE pc_int64 offset_in(const PcLse& lse, int token, int head) {
  return token * lse.token_stride + head * lse.head_stride;
}

template <typename T, int Count>
PC_DEVICE void merge_row(const PcMergeParams& params) {
  const int number = pc_block_x() * pc_num_threads() + pc_thread(), lanes = 1 << params.lanes_shift;
  const int row = number >> params.lanes_shift, lane = number & (lanes - 1);
  const bool exists = row < params.num_rows;
  const int token = exists ? divide(row, params.num_heads) : 0;
  const int head = exists ? row - token * params.num_heads.divisor : 0;
  const Global<T> out_a(params.out_a.data), out_b(params.out_b.data), out(params.out.data);
  const pc_int64 in_a = offset_in(params.out_a, token, head), in_b = offset_in(params.out_b, token, head);
  const pc_int64 in_out = offset_in(params.out, token, head);
  const int last = exists ? params.units_per_row : 0;
  float a = 0.0f, b = 0.0f;
  if (exists) {
    a = Global<float>(params.lse_a.data).load(offset_in(params.lse_a, token, head));
    b = Global<float>(params.lse_b.data).load(offset_in(params.lse_b, token, head));
  }
  const MergeWeights weights = merge_weights(a, b);
  pc_sync_warp();
  if (exists && lane == 0) {
    Global<float>(params.lse.data).store(offset_in(params.lse, token, head), weights.lse);
  }
  PC_NO_UNROLL
  for (int unit = lane; unit < last; unit += lanes) {
    const Unit<T, Count> part_a = load_unit<T, Count, false>(out_a, in_a + unit * Count);
    const Unit<T, Count> part_b = load_unit<T, Count, false>(out_b, in_b + unit * Count);
    store_unit(out, in_out + unit * Count, merge_units(part_a, part_b, weights));
  }
}

template <typename T>
PC_KERNEL(128, 8)
void merge_parts(const PcMergeParams params) {
  if constexpr (sizeof(T) == 2) {
    if (params.unit == 8) return merge_row<T, 8>(params);
  }
  if (params.unit == 4) return merge_row<T, 4>(params);
  if (params.unit == 2) return merge_row<T, 2>(params);
  merge_row<T, 1>(params);
}

}  // namespace pagecore
