// Merge of any number of attention outputs over different keys, row by row. Two parts give the bits of merge.hpp.
#pragma once

#include "pagecore/ops/cpu/kernels/merge.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr int64_t kKeptWeights = 256;  // of a row with more parts, weights are computed again for each column
constexpr int kColumnVectors = 4;

// The parts of a row; a row is one head of one token.
struct PartRow {
  const char* out = nullptr;
  const char* lse = nullptr;
  int64_t out_stride = 0;  // bytes, from part to part
  int64_t lse_stride = 0;
  int64_t count = 0;

  [[nodiscard]] double weight(int64_t part) const {
    return log_weight(*reinterpret_cast<const float*>(lse + part * lse_stride));
  }
};

// The largest lse of a row, and the sum of exp(lse - top).
struct PartSum {
  double top = -static_cast<double>(kInfinity);
  double total = 0.0;  // 0 if no part has keys
};

inline PartRow parts_of(const MergeManyArgs& args, int64_t token, int64_t head) {
  const bool is_ragged = args.cu_parts.data != nullptr;
  int64_t first = 0, end = args.parts.num_tokens;
  if (is_ragged) {
    // Another thread may change the array after its check.
    const int64_t all = end, begin = args.cu_parts.at(token), next = args.cu_parts.at(token + 1);
    first = begin < 0 ? 0 : begin > all ? all : begin;
    end = next < first ? first : next > all ? all : next;
  }
  PartRow row;
  row.out = args.parts.data + token * args.token_stride + head * args.parts.head_stride;
  row.lse = args.lses.data + token * args.lse_token_stride + head * args.lses.head_stride;
  row.out_stride = args.parts.token_stride;
  row.lse_stride = args.lses.token_stride;
  row.out += first * row.out_stride;
  row.lse += first * row.lse_stride;
  row.count = end - first;
  return row;
}

// Keeps the terms of the sum in `terms` if that is not null.
inline PartSum sum_of(const PartRow& row, double* terms) {
  PartSum sum;
  const double none = sum.top;
  bool is_empty = true;
  for (int64_t part = 0; part < row.count; ++part) {
    const double weight = row.weight(part);
    if (weight > sum.top) sum.top = weight;
    if (weight != none) is_empty = false;  // also NaN
  }
  if (is_empty) return sum;
  for (int64_t part = 0; part < row.count; ++part) {
    const double term = __builtin_exp(row.weight(part) - sum.top);
    sum.total += term;
    if (terms != nullptr) terms[part] = term;
  }
  return sum;
}

inline void fill_weights(const PartRow& row, const PartSum& sum, int64_t first, int64_t count, float* weights) {
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = static_cast<float>(__builtin_exp(row.weight(first + i) - sum.top) / sum.total);
  }
}

// Merges kVectors vectors of a row from number d on, or `count` numbers of one vector. An input with weight 0 is not
// read.
template <Float T, int kVectors>
PC_FORCE_INLINE void merge_columns(const PartRow& row, const PartSum& sum, float* weights, int64_t d, int64_t count,
                                   char* out) {
  Vec merged[kVectors];
  for (Vec& vector : merged) vector = splat(row.count == 0 ? 0.0f : -0.0f);  // -0.0 + x is x for zeros of either sign
  for (int64_t first = 0; first < row.count; first += kKeptWeights) {
    const int64_t kept = row.count - first < kKeptWeights ? row.count - first : kKeptWeights;
    if (row.count > kKeptWeights) fill_weights(row, sum, first, kept, weights);
    const char* part = row.out + first * row.out_stride + d * kSize<T>;
    for (int64_t i = 0; i < kept; ++i, part += row.out_stride) {
      if (weights[i] == 0.0f) continue;
      const Vec weight = splat(weights[i]);
      for (int v = 0; v < kVectors; ++v) {
        const char* at = part + v * kLanes * kSize<T>;
        merged[v] = fma(count < kLanes ? load_tail<T>(at, count) : load_as_float<T>(at), weight, merged[v]);
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) store_part<T>(out, d + v * kLanes, merged[v], count < kLanes ? count : kLanes);
}

template <Float T>
inline void merge_part_row(const MergeManyArgs& args, int64_t token, int64_t head) {
  PartRow row = parts_of(args, token, head);
  double terms[kKeptWeights];
  float weights[kKeptWeights];
  const bool is_kept = row.count <= kKeptWeights;
  const PartSum sum = sum_of(row, is_kept ? terms : nullptr);
  if (sum.total == 0.0) row.count = 0;
  for (int64_t i = 0; is_kept && i < row.count; ++i) weights[i] = static_cast<float>(terms[i] / sum.total);
  char* out = args.out.data + token * args.out.token_stride + head * args.out.head_stride;
  int64_t d = 0;
  for (; d + kColumnVectors * kLanes <= args.out.dim; d += kColumnVectors * kLanes) {
    merge_columns<T, kColumnVectors>(row, sum, weights, d, kLanes, out);
  }
  for (; d < args.out.dim; d += kLanes) merge_columns<T, 1>(row, sum, weights, d, args.out.dim - d, out);
  if (args.lse.data == nullptr) return;
  args.lse.at(token, head) = row.count == 0 ? -kInfinity : static_cast<float>(sum.top + __builtin_log(sum.total));
}

inline void merge_many(const MergeManyArgs& args, int64_t begin, int64_t end) {
  with_float(args.out.type, [&]<Float T>() {
    for (int64_t row = begin; row < end; ++row) {
      merge_part_row<T>(args, row / args.out.num_heads, row % args.out.num_heads);
    }
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
