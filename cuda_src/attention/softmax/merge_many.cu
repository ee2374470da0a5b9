// Merge of any number of partial attention results over different keys, row by row; a row is one head of one token.
//
//   row     | unit | unit | ...     a unit is 16 bytes, or less if an address, a stride or the row's length requires it
//   lanes   1 << lanes_shift lanes of one warp, at most one for each unit; they take units in turn
//
// Each lane reads all lse of its row twice, which the lanes of a row share through the cache, to sum the weights. Then
// it reads its units of all parts, four of them in flight. The parts are read once and the output is written once. Sums
// are in the order of the parts, so that two parts give the bits of merge.cu.
#include "cuda_src/abi/merge.h"
#include "cuda_src/attention/softmax/merge_rows.cuh"
#include "cuda_src/device/units.cuh"

namespace pagecore {

// The parts of a row.
template <typename T>
struct PartRow {
  Global<T> out;
  Global<float> lse;
  pc_int64 out_stride;
  pc_int64 lse_stride;
  int count;

  PC_MEMBER float weight(int part) const { return log_weight(lse.load(part * lse_stride)); }
};

// The largest lse of a row, and the sum of exp(lse - top).
struct PartSum {
  float top;
  float total;  // 0 if no part has keys
};

template <typename T>
PC_DEVICE PartRow<T> parts_of(const PcMergeManyParams& params, int token, int head) {
  int first = 0, end = params.num_parts;
  if (params.cu_parts.data != 0) {
    first = clamp(load_index(params.cu_parts, token), 0, params.num_parts);
    end = clamp(load_index(params.cu_parts, token + 1), first, params.num_parts);  // fault: end_of_parts
  }
  const Global<T> out(params.parts.data);
  const Global<float> lse(params.lses.data);
  return {out + (token * params.token_stride + offset_in(params.parts, first, head)),
          lse + (token * params.lse_token_stride + offset_in(params.lses, first, head)), params.parts.token_stride,
          params.lses.token_stride, end - first};
}

template <typename T>
PC_DEVICE PartSum sum_of(const PartRow<T>& row) {
  PartSum sum = {-pc_infinity(), 0.0f};
  bool is_empty = true;
  PC_NO_UNROLL
  for (int part = 0; part < row.count; ++part) {
    const float weight = row.weight(part);
    if (weight > sum.top) sum.top = weight;          // fault: top_of_parts
    if (weight != -pc_infinity()) is_empty = false;  // also NaN
  }
  if (is_empty) return sum;  // fault: no_part_with_keys
  PC_NO_UNROLL
  for (int part = 0; part < row.count; ++part) sum.total += pc_exp2((row.weight(part) - sum.top) * kLog2OfE);
  return sum;
}

template <typename T, int Count>
PC_DEVICE Unit<T, Count> merge_unit(const PartRow<T>& row, const PartSum& sum, pc_int64 at) {
  constexpr int kInFlight = 4;
  float values[Count];
  PC_UNROLL
  for (int j = 0; j < Count; ++j) values[j] = row.count == 0 ? 0.0f : -0.0f;  // -0.0 + x is x for zeros of either sign
  PC_NO_UNROLL
  for (int first = 0; first < row.count; first += kInFlight) {
    Unit<T, Count> units[kInFlight];
    float weights[kInFlight];
    PC_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i >= row.count) break;
      units[i] = load_unit<T, Count, false>(row.out, (first + i) * row.out_stride + at);
      weights[i] = row.weight(first + i);
    }
    PC_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i >= row.count) break;
      const float weight = pc_exp2((weights[i] - sum.top) * kLog2OfE) / sum.total;
      // Numbers of weight 0 may be NaN.
      if (weight == 0.0f) continue;  // fault: part_of_weight_0
      PC_UNROLL
      for (int j = 0; j < Count; ++j) values[j] = pc_fma(element(units[i], j), weight, values[j]);
    }
  }
  return unit_of<T>(values);
}

template <typename T, int Count>
PC_DEVICE void merge_row(const PcMergeManyParams& params) {
  const int number = pc_block_x() * pc_num_threads() + pc_thread(), lanes = 1 << params.lanes_shift;
  const int index = number >> params.lanes_shift, lane = number & (lanes - 1);
  if (index >= params.num_rows) return;
  const int token = divide(index, params.num_heads), head = index - token * params.num_heads.divisor;
  PartRow<T> row = parts_of<T>(params, token, head);
  const PartSum sum = sum_of(row);
  if (sum.total == 0.0f) row.count = 0;
  if (lane == 0) {
    const float lse = row.count == 0 ? -pc_infinity() : sum.top + pc_log2(sum.total) * kLogOf2;
    Global<float>(params.lse.data).store(offset_in(params.lse, token, head), lse);
  }
  const Global<T> out(params.out.data);
  const pc_int64 in_out = offset_in(params.out, token, head);
  PC_NO_UNROLL
  for (int unit = lane; unit < params.units_per_row; unit += lanes) {
    store_unit(out, in_out + unit * Count, merge_unit<T, Count>(row, sum, unit * Count));
  }
}

template <typename T>
PC_KERNEL(128, 8)
void merge_many(const PcMergeManyParams params) {
  if constexpr (sizeof(T) == 2) {
    if (params.unit == 8) return merge_row<T, 8>(params);
  }
  if (params.unit == 4) return merge_row<T, 4>(params);
  if (params.unit == 2) return merge_row<T, 2>(params);
  merge_row<T, 1>(params);
}

}  // namespace pagecore
