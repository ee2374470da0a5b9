// Row by row: the slot-mapped write and the merge of two attention outputs.
#pragma once

#include "pagecore/ops/cpu/kernels/convert.hpp"
#include "pagecore/ops/cpu/kernels/math.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

template <Float From, Float To>
PC_FORCE_INLINE void convert_row(const char* source, char* target, int64_t dim, float divisor) {
  for_each_vector<From>(source, dim,
                        [&](int64_t d, Vec v, int64_t count) { store_part<To>(target, d, v / divisor, count); });
}

// One token's heads; a stored number is the given one divided by its head's scale.
inline void write_token(const Rows& rows, int64_t token, const Cache& cache, int64_t slot, const PerHead& scale) {
  const int64_t block = slot / cache.block_size;
  const char* source = rows.data + token * rows.token_stride;
  char* target = cache.data + block * cache.block_stride + (slot - block * cache.block_size) * cache.token_stride;
  for (int64_t head = 0; head < rows.num_heads; ++head) {
    const float divisor = head_value(scale, head, 1.0f);
    with_float(rows.type, [&]<Float From>() {
      with_float(cache.type, [&]<Float To>() {
        convert_row<From, To>(source + head * rows.head_stride, target + head * cache.head_stride, rows.dim, divisor);
      });
    });
  }
}

// The same where nothing is converted.
inline void copy_token(const Rows& rows, int64_t token, const Cache& cache, int64_t slot) {
  const int64_t block = slot / cache.block_size;
  const char* source = rows.data + token * rows.token_stride;
  char* target = cache.data + block * cache.block_stride + (slot - block * cache.block_size) * cache.token_stride;
  const int64_t bytes = rows.dim * size_of(rows.type);
  if (rows.head_stride == bytes && cache.head_stride == bytes) {
    __builtin_memcpy(target, source, static_cast<size_t>(bytes * rows.num_heads));
    return;
  }
  for (int64_t head = 0; head < rows.num_heads; ++head) {
    __builtin_memcpy(target + head * cache.head_stride, source + head * rows.head_stride, static_cast<size_t>(bytes));
  }
}

inline void write_plane(const Rows& rows, const Cache& cache, const Indices& slots, const PerHead& scale) {
  const bool same = rows.type == cache.type && scale.data == nullptr;
  for (int64_t token = 0; token < slots.size; ++token) {
    const int64_t slot = slots.at(token);
    if (slot < 0) continue;
    if (same) {
      copy_token(rows, token, cache, slot);
    } else {
      write_token(rows, token, cache, slot, scale);
    }
  }
}

inline void write(const WriteArgs& args) {
  write_plane(args.key, args.key_cache, args.slots, args.key_scale);
  write_plane(args.value, args.value_cache, args.slots, args.value_scale);
}

PC_FORCE_INLINE Vec load_row_part(const Rows& rows, const char* row, int64_t d, int64_t count) {
  return with_float(rows.type, [&]<Float T>() {
    return count == kLanes ? load_as_float<T>(row + d * kSize<T>) : load_tail<T>(row + d * kSize<T>, count);
  });
}

// out = a * weight_a + b * weight_b; a part of weight 0 is not looked at.
inline void merge_row(const MergeArgs& args, int64_t token, int64_t head, float weight_a, float weight_b) {
  const auto row_of = [&](const Rows& rows) { return rows.data + token * rows.token_stride + head * rows.head_stride; };
  for (int64_t d = 0; d < args.out.dim; d += kLanes) {
    const int64_t count = args.out.dim - d < kLanes ? args.out.dim - d : kLanes;
    Vec merged = {};
    if (weight_a != 0.0f) merged = load_row_part(args.out_a, row_of(args.out_a), d, count) * weight_a;
    if (weight_b != 0.0f)
      merged = fma(load_row_part(args.out_b, row_of(args.out_b), d, count), splat(weight_b), merged);
    with_float(args.out.type, [&]<Float T>() { store_part<T>(row_of(args.out), d, merged, count); });
  }
}

inline void merge(const MergeArgs& args) {
  for (int64_t token = 0; token < args.out.num_tokens; ++token) {
    for (int64_t head = 0; head < args.out.num_heads; ++head) {
      const double a = args.lse_a.at(token, head), b = args.lse_b.at(token, head);
      const double top = a > b ? a : b;
      if (top == -static_cast<double>(kInfinity)) {
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
