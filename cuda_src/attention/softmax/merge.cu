// Merge of two partial attention results over different keys, row by row; a row is one head of one token.
//
//   row     | unit | unit | ...     a unit is 16 bytes, or less if an address, a stride or the row's length requires it
//   lanes   1 << lanes_shift lanes of one warp, at most one for each unit; they take units in turn
//
// The lanes of a row are in one warp, so that all of them have read the row's two lse before one of them writes the
// merged lse, which may replace one of these. A unit is written by the lane that has read it, so that the output may be
// one of the inputs. Both inputs are read once and the output is written once. Of a token that the mask leaves out,
// part a is copied bit by bit and part b is not read.
#include "cuda_src/abi/merge.h"
#include "cuda_src/attention/softmax/merge_rows.cuh"
#include "cuda_src/device/units.cuh"

namespace pagecore {

// Weights of the two parts of a row, and the merged lse.
struct MergeWeights {
  float a;
  float b;
  float lse;
};

PC_DEVICE MergeWeights merge_weights(float lse_a, float lse_b) {
  const float a = log_weight(lse_a), b = log_weight(lse_b);
  const float top = a > b ? a : b;
  if (a == -pc_infinity() && b == -pc_infinity()) return {0.0f, 0.0f, top};
  const float part_a = pc_exp2((a - top) * kLog2OfE), part_b = pc_exp2((b - top) * kLog2OfE), total = part_a + part_b;
  return {part_a / total, part_b / total, top + pc_log2(total) * kLogOf2};
}

template <typename T, int Count>
PC_DEVICE Unit<T, Count> merge_units(const Unit<T, Count>& a, const Unit<T, Count>& b, const MergeWeights& weights) {
  const float none = weights.a == 0.0f && weights.b == 0.0f ? 0.0f : -0.0f;  // -0.0 + x is x for zeros of either sign
  float values[Count];
  PC_UNROLL
  for (int i = 0; i < Count; ++i) {
    // A part of weight 0 is not read as a number: it may be NaN.
    const float part = weights.a != 0.0f ? element(a, i) * weights.a : none;
    values[i] = weights.b != 0.0f ? pc_fma(element(b, i), weights.b, part) : part;
  }
  return unit_of<T>(values);
}

template <typename T, int Count>
PC_DEVICE void merge_row(const PcMaskedMergeParams& all) {
  const PcMergeParams& params = all.merge;
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
  bool is_copied = false;
  if (exists) {
    a = Global<float>(params.lse_a.data).load(offset_in(params.lse_a, token, head));
    b = Global<float>(params.lse_b.data).load(offset_in(params.lse_b, token, head));
    if (all.mask != 0) {
      is_copied = Global<pc_uint8>(all.mask).load(token * all.mask_stride) == 0;  // fault: masked_token
    }
  }
  const MergeWeights weights = merge_weights(a, b);
  pc_sync_warp();
  if (exists && lane == 0) {
    Global<float>(params.lse.data).store(offset_in(params.lse, token, head), is_copied ? a : weights.lse);
  }
  PC_NO_UNROLL
  for (int unit = lane; unit < last; unit += lanes) {
    const Unit<T, Count> part_a = load_unit<T, Count, false>(out_a, in_a + unit * Count);
    if (is_copied) {
      store_unit(out, in_out + unit * Count, part_a);
      continue;
    }
    const Unit<T, Count> part_b = load_unit<T, Count, false>(out_b, in_b + unit * Count);
    store_unit(out, in_out + unit * Count, merge_units(part_a, part_b, weights));
  }
}

template <typename T>
PC_KERNEL(128, 8)
void merge_parts(const PcMaskedMergeParams params) {
  if constexpr (sizeof(T) == 2) {
    if (params.merge.unit == 8) return merge_row<T, 8>(params);
  }
  if (params.merge.unit == 4) return merge_row<T, 4>(params);
  if (params.merge.unit == 2) return merge_row<T, 2>(params);
  merge_row<T, 1>(params);
}

}  // namespace pagecore
