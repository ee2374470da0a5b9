// The Walsh-Hadamard transform of the blocks of a row, in float32.
//
//   step h = 1, 2, 4 ... block / 2:   x[i], x[i + h]  become  x[i] + x[i + h], x[i] - x[i + h]   for i without bit h
//
// and then every number is multiplied by block ** -0.5. Every instruction set, and CUDA, takes the steps in this order,
// so that all have the same bits. Steps within a vector are a shuffle and a product by 1 or -1.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/hadamard_rows.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// One step with h < kLanes.
template <int kStep, int... I>
PC_FORCE_INLINE Vec step_of_lanes(Vec v, std::integer_sequence<int, I...>) {
  constexpr Vec kSigns = {((I & kStep) != 0 ? -1.0f : 1.0f)...};
  return fma(v, kSigns, __builtin_shufflevector(v, v, (I ^ kStep)...));
}

// The steps of blocks of `block` numbers within a vector.
PC_FORCE_INLINE Vec steps_of_lanes(Vec v, int64_t block) {
  constexpr auto kEach = std::make_integer_sequence<int, kLanes>{};
  v = step_of_lanes<2>(step_of_lanes<1>(v, kEach), kEach);
  if constexpr (kLanes > 4) v = step_of_lanes<4>(v, kEach);
  if constexpr (kLanes > 8) {
    if (block > 8) v = step_of_lanes<8>(v, kEach);
  }
  return v;
}

// The steps between the vectors of a block.
template <int kVectors>
PC_FORCE_INLINE void steps_of_vectors(Vec (&v)[kVectors]) {
#pragma GCC unroll 8
  for (int step = 1; step < kVectors; step *= 2) {
#pragma GCC unroll 64
    for (int i = 0; i < kVectors; ++i) {
      if ((i & step) != 0) continue;
      const Vec low = v[i], high = v[i + step];
      v[i] = low + high;
      v[i + step] = low - high;
    }
  }
}

// A row of blocks of kVectors vectors.
template <Float T, int kVectors>
inline void transform_row(const char* source, char* target, int64_t dim, float scale) {
  constexpr int64_t kBlock = int64_t{kVectors} * kLanes;
  for (int64_t first = 0; first < dim; first += kBlock) {
    Vec v[kVectors];
#pragma GCC unroll 64
    for (int i = 0; i < kVectors; ++i) {
      v[i] = steps_of_lanes(load_as_float<T>(source + (first + i * kLanes) * kSize<T>), kBlock);
    }
    steps_of_vectors<kVectors>(v);
#pragma GCC unroll 64
    for (int i = 0; i < kVectors; ++i) {
      store_from_float<T>(target + (first + i * kLanes) * kSize<T>, v[i] * scale);
    }
  }
}

// A row of blocks that are shorter than a vector.
template <Float T>
inline void transform_short_blocks(const char* source, char* target, int64_t dim, float scale) {
  for_each_vector<T>(source, dim, [&](int64_t i, Vec v, int64_t count) {
    store_part<T>(target, i, steps_of_lanes(v, kHadamardMin) * scale, count);
  });
}

template <Float T>
inline void (*row_transform(int64_t block))(const char*, char*, int64_t, float) {
  constexpr int kLargest = static_cast<int>(kHadamardMax) / kLanes;
  switch (block / kLanes) {
    case 0: return transform_short_blocks<T>;
    case 1: return transform_row<T, 1>;
    case 2: return transform_row<T, 2>;
    case 4: return transform_row<T, 4>;
    case 8: return transform_row<T, 8>;
    case 16: return transform_row<T, 16>;
    case 32: return transform_row < T, kLargest < 32 ? kLargest : 32 > ;
    default: return transform_row<T, kLargest>;
  }
}

// Rows [begin, end) of outer * inner.
inline void transform_rows(const HadamardRows& rows, int64_t begin, int64_t end) {
  const int64_t block = hadamard_block(rows.dim);
  const float scale = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(block)));
  const auto transform = with_float(rows.type, [&]<Float T>() { return row_transform<T>(block); });
  int64_t outer = begin / rows.inner, inner = begin % rows.inner;
  for (int64_t row = begin; row < end; ++row) {
    transform(rows.source + outer * rows.source_outer_stride + inner * rows.source_inner_stride,
              rows.target + outer * rows.target_outer_stride + inner * rows.target_inner_stride, rows.dim, scale);
    if (++inner == rows.inner) {
      inner = 0;
      ++outer;
    }
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
