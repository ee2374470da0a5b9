// Matrix products with a packed right side (panels.hpp): out = left . right, or out = factor[row] * out + left . right.
//
// A register block holds R rows x N vectors of sums. Each sum starts at zero and adds its products in the order of
// depth, in every block shape, so a row's bits do not depend on the other rows. Long sums of floats are added in parts
// of equal length.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/convert.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSumVectors = 4;
#else
constexpr int kSumVectors = 2;
#endif
constexpr int kSumRows = 6;

// One step consumes four bytes of each left row and one row of the right side.
struct Product {
  const char* left;
  int64_t left_stride;  // in bytes
  const float* right;
  int64_t right_stride;
  float* out;
  int64_t out_stride;
  const float* factor;  // [rows]; null: overwrite `out`
  int64_t rows;
  int64_t steps;
  int64_t columns;
  bool adds = false;  // to `out`, whatever the factor
};

struct OfFloats {
  using Left = float;
  PC_FORCE_INLINE static Vec add(Vec sum, Left left, Vec right) { return fma(splat(left), right, sum); }
};

// Stores a sum. Every product combines with the old output here.
PC_FORCE_INLINE void add_product(float* out, Vec sum, const float* factor, bool adds = false) {
  if (adds) return store(out, load(out) + sum);
  store(out, factor == nullptr ? sum : fma(load(out), splat(*factor), sum));
}

template <typename Of, int R, int N>
void multiply_block(const Product& p, int64_t row, int64_t column) {
  const char* left = p.left + row * p.left_stride;
  const float* right = p.right + column;
  Vec sums[R][N] = {};
  for (int64_t step = 0; step < p.steps; ++step, left += 4, right += p.right_stride) {
    Vec across[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) across[n] = load(right + n * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      typename Of::Left down;
      __builtin_memcpy(&down, left + r * p.left_stride, sizeof(down));
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = Of::add(sums[r][n], down, across[n]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    float* out = p.out + (row + r) * p.out_stride + column;
    const float* factor = p.factor == nullptr ? nullptr : p.factor + row + r;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) add_product(out + n * kLanes, sums[r][n], factor, p.adds);
  }
}

template <typename Of, int R>
void multiply_rows(const Product& p, int64_t row) {
  int64_t column = 0;
  for (; column + kSumVectors * kLanes <= p.columns; column += kSumVectors * kLanes) {
    multiply_block<Of, R, kSumVectors>(p, row, column);
  }
  if constexpr (kSumVectors > 2) {
    if (column + 2 * kLanes <= p.columns) {
      multiply_block<Of, R, 2>(p, row, column);
      column += 2 * kLanes;
    }
  }
  if (column < p.columns) multiply_block<Of, R, 1>(p, row, column);
}

template <typename Of>
void multiply(const Product& p) {
  int64_t row = 0;
  for (; row + kSumRows <= p.rows; row += kSumRows) multiply_rows<Of, kSumRows>(p, row);
  switch (p.rows - row) {
    case 1: return multiply_rows<Of, 1>(p, row);
    case 2: return multiply_rows<Of, 2>(p, row);
    case 3: return multiply_rows<Of, 3>(p, row);
    case 4: return multiply_rows<Of, 4>(p, row);
    case 5: return multiply_rows<Of, 5>(p, row);
    default: return;
  }
}

// More products than kWholeSteps are summed in parts of kPartSteps: the rounding error of a sum grows with its length.
constexpr int64_t kWholeSteps = 256;
constexpr int64_t kPartSteps = 64;

// Calls `multiply` with the product, or with each part of a long one.
template <typename Multiply>
void multiply_parts(Product p, Multiply multiply) {
  if (p.steps <= kWholeSteps) return multiply(p);
  for (int64_t left = p.steps; left > 0; left -= kPartSteps) {
    p.steps = left < kPartSteps ? left : kPartSteps;
    multiply(p);
    p.left += 4 * kPartSteps;
    p.right += kPartSteps * p.right_stride;
    p.adds = true;
  }
}

// a [rows, depth], b [depth, columns], c [rows, columns]; strides in elements. `columns` is a multiple of kPadding.
inline void multiply_floats(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                            const float* factor, int64_t rows, int64_t depth, int64_t columns) {
  multiply_parts({reinterpret_cast<const char*>(a), 4 * lda, b, ldb, c, ldc, factor, rows, depth, columns},
                 [](const Product& part) { multiply<OfFloats>(part); });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
