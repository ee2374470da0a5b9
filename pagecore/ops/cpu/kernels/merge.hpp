// Merge of two attention outputs over different keys, row by row.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/cpu/kernels/simd/math.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

PC_FORCE_INLINE Vec load_row_part(const TokenArray& rows, const char* row, int64_t d, int64_t count) {
  return with_float(rows.type, [&]<Float T>() {
    return count == kLanes ? load_as_float<T>(row + d * kSize<T>) : load_tail<T>(row + d * kSize<T>, count);
  });
}

// out = a * weight_a + b * weight_b. An input with weight 0 is not read, and the other one keeps the signs of its
// zeros.
inline void merge_row(const MergeArgs& args, int64_t token, int64_t head, float weight_a, float weight_b) {
  const auto row_of = [&](const TokenArray& rows) {
    return rows.data + token * rows.token_stride + head * rows.head_stride;
  };
  for (int64_t d = 0; d < args.out.dim; d += kLanes) {
    const int64_t count = args.out.dim - d < kLanes ? args.out.dim - d : kLanes;
    Vec merged = weight_a == 0.0f && weight_b == 0.0f ? Vec{} : splat(-0.0f);  // -0.0 + x is x for zeros of either sign
    if (weight_a != 0.0f) merged = load_row_part(args.out_a, row_of(args.out_a), d, count) * weight_a;
    if (weight_b != 0.0f) {
      merged = fma(load_row_part(args.out_b, row_of(args.out_b), d, count), splat(weight_b), merged);
    }
    with_float(args.out.type, [&]<Float T>() { store_part<T>(row_of(args.out), d, merged, count); });
  }
}

// An lse as the weight of its part: +inf is what FlashAttention reports for a query without keys.
inline double log_weight(float lse) { return lse == kInfinity ? -static_cast<double>(kInfinity) : lse; }

// Copies part a of a token that the mask leaves out, bit by bit.
inline void copy_token(const MergeArgs& args, int64_t token) {
  const int64_t bytes = args.out.dim * size_of(args.out.type);
  const char* from = args.out_a.data + token * args.out_a.token_stride;
  char* to = args.out.data + token * args.out.token_stride;
  for (int64_t head = 0; head < args.out.num_heads; ++head) {
    if (from != to) __builtin_memcpy(to, from, static_cast<size_t>(bytes));
    from += args.out_a.head_stride;
    to += args.out.head_stride;
    if (args.lse.data != nullptr) args.lse.at(token, head) = args.lse_a.at(token, head);
  }
}

inline void merge(const MergeArgs& args) {
  for (int64_t token = 0; token < args.out.num_tokens; ++token) {
    if (args.mask != nullptr && args.mask[token * args.mask_stride] == 0) {
      copy_token(args, token);
      continue;
    }
    for (int64_t head = 0; head < args.out.num_heads; ++head) {
      const double none = -static_cast<double>(kInfinity), a = log_weight(args.lse_a.at(token, head));
      const double b = log_weight(args.lse_b.at(token, head)), top = a > b ? a : b;
      if (a == none && b == none) {
        merge_row(args, token, head, 0.0f, 0.0f);
        if (args.lse.data != nullptr) args.lse.at(token, head) = -kInfinity;
        continue;
      }
      const double part_a = __builtin_exp(a - top), part_b = __builtin_exp(b - top), total = part_a + part_b;
      merge_row(args, token, head, static_cast<float>(part_a / total), static_cast<float>(part_b / total));
      if (args.lse.data != nullptr) args.lse.at(token, head) = static_cast<float>(top + __builtin_log(total));
    }
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
