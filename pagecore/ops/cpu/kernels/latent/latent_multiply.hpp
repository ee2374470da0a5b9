// Products of a tile of unpacked rows, in register blocks of one or two vectors, with a prefetch in each step.
//
//   scores^T [64 tokens, rows] = unpacked [64, width] . query panel [width, rows]
//   sums [rows, latent]        = weights [rows, 64] . values [64, latent]
//
// The keys are the left side of the scores, so that only the queries, once for an item, and the weights are transposed.
#pragma once

#include "pagecore/ops/cpu/kernels/products/multiply_pairs.hpp"
#include "pagecore/ops/cpu/kernels/simd/lines.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX)

// Prefetches rows of equal length in four streams, a cache line of each in a step. One stream comes from memory at half
// the speed, and steps in quick succession stall.
class RowPrefetch {
 public:
  PC_FORCE_INLINE RowPrefetch() = default;
  PC_FORCE_INLINE RowPrefetch(const char* const* rows, int count, int64_t row_bytes)
      : rows_(rows), last_(count - 1), each_((count + kStreams - 1) / kStreams), row_bytes_(row_bytes) {}

  PC_FORCE_INLINE void step() {
    if (row_ == each_) return;
    for (int row = row_; row < row_ + kStreams * each_; row += each_) {
      __builtin_prefetch(rows_[row < last_ ? row : last_] + byte_, 0, 3);
    }
    byte_ += kLine;
    if (byte_ < row_bytes_) return;
    byte_ = 0;
    ++row_;
  }
  PC_FORCE_INLINE void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }

 private:
  static constexpr int kStreams = 4;

  const char* const* rows_ = nullptr;
  int last_ = 0, each_ = 0, row_ = 0;
  int64_t row_bytes_ = 0, byte_ = 0;
};

#else

// Prefetches rows of equal length, a cache line in each step.
class RowPrefetch {
 public:
  PC_FORCE_INLINE RowPrefetch() = default;
  PC_FORCE_INLINE RowPrefetch(const char* const* rows, int count, int64_t row_bytes)
      : row_(rows), last_(rows + count), row_bytes_(row_bytes) {
    if (count > 0) begin_row();
  }

  PC_FORCE_INLINE void step() {
    if (row_ == last_) return;
    __builtin_prefetch(line_, 0, 3);
    line_ += kLine;
    if (line_ < end_) return;
    if (++row_ != last_) begin_row();
  }
  PC_FORCE_INLINE void steps(int) {}  // products take all steps

 private:
  PC_FORCE_INLINE void begin_row() {
    line_ = *row_;
    end_ = line_ + row_bytes_;
  }

  const char* const* row_ = nullptr;
  const char* const* last_ = nullptr;
  int64_t row_bytes_ = 0;
  const char* line_ = nullptr;
  const char* end_ = nullptr;
};

#endif

// Columns of a strip: two vectors of the widest instruction set.
constexpr int64_t kStripColumns = 32;

// Left rows of `depth` numbers, bfloat16 for pairs; the other operands as in multiply_pairs and multiply_floats.
// Strides are in numbers of the operand.
struct TileProduct {
  const void* left;
  int64_t left_stride;
  const float* right;
  int64_t right_stride;
  float* out;
  int64_t out_stride;
  const float* factor;
  int64_t rows;
  int64_t depth;
  int64_t columns;
};

#if defined(__AVX512F__)

// A stride of left rows in bytes that the compiler knows, so that the address of each row is a constant offset; 0: any.
template <typename Of, int kStride, int R, int N>
void multiply_tall_block(const Product& p, int64_t row, int64_t column, RowPrefetch& prefetch) {
  const int64_t stride = kStride != 0 ? kStride : p.left_stride;
  const char* left = p.left + row * stride;
  const float* right = p.right + column;
  const int64_t right_stride = p.right_stride;
  RowPrefetch next = prefetch;
  Vec sums[R][N] = {};
  for (int64_t step = 0; step < p.steps; ++step, left += 4, right += right_stride) {
    next.step();
    Vec across[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) across[n] = load(right + n * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      typename Of::Left down;
      __builtin_memcpy(&down, left + r * stride, sizeof(down));
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sums[r][n] = Of::add(sums[r][n], down, across[n]);
    }
  }
  prefetch = next;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    float* out = p.out + (row + r) * p.out_stride + column;
    const float* factor = p.factor == nullptr ? nullptr : p.factor + row + r;
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) add_product(out + n * kLanes, sums[r][n], factor, p.adds);
  }
}

template <typename Of, int kStride, int N>
void multiply_tall_column(const Product& p, int64_t column, RowPrefetch& prefetch) {
  int64_t row = 0;
  if constexpr (N == 1) {
    for (; row + 16 <= p.rows; row += 16) multiply_tall_block<Of, kStride, 16, N>(p, row, column, prefetch);
  }
  for (; row + 8 <= p.rows; row += 8) multiply_tall_block<Of, kStride, 8, N>(p, row, column, prefetch);
  if (row + 4 <= p.rows) multiply_tall_block<Of, kStride, 4, N>(p, row, column, prefetch), row += 4;
  if (row + 2 <= p.rows) multiply_tall_block<Of, kStride, 2, N>(p, row, column, prefetch), row += 2;
  if (row < p.rows) multiply_tall_block<Of, kStride, 1, N>(p, row, column, prefetch);
}

// Sixteen sums hide the latency of a multiplication, and the right side of a strip stays in the L1 cache for all rows.
template <typename Of, int kStride>
void multiply_tall(const Product& p, RowPrefetch& prefetch) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= p.columns; column += 2 * kLanes) {
    multiply_tall_column<Of, kStride, 2>(p, column, prefetch);
  }
  if (column < p.columns) multiply_tall_column<Of, kStride, 1>(p, column, prefetch);
}

template <typename Of>
void multiply_tile(const Product& p, RowPrefetch& prefetch) {
  constexpr int kNumber = sizeof(typename Of::Left) == 4 && !__is_same(typename Of::Left, float) ? 2 : 4;
  switch (p.left_stride) {
    case 64 * kNumber: return multiply_tall<Of, 64 * kNumber>(p, prefetch);    // weights
    case 576 * kNumber: return multiply_tall<Of, 576 * kNumber>(p, prefetch);  // 512 latent and 64 rope numbers
    default: return multiply_tall<Of, 0>(p, prefetch);
  }
}

#else

template <typename Of>
void multiply_tile(const Product& p, RowPrefetch&) {
  multiply<Of>(p);
}

#endif

inline void multiply_tile_pairs([[maybe_unused]] AmxTiles& tiles, [[maybe_unused]] const TileProduct& p,
                                [[maybe_unused]] RowPrefetch& prefetch) {
#if defined(__AVX512BF16__) && !defined(PC_AMX)
  multiply_tile<OfPairs>({static_cast<const char*>(p.left), 2 * p.left_stride, p.right, p.right_stride, p.out,
                          p.out_stride, p.factor, p.rows, p.depth / 2, p.columns},
                         prefetch);
#else
  multiply_pairs(tiles, static_cast<const uint16_t*>(p.left), p.left_stride, reinterpret_cast<const uint32_t*>(p.right),
                 p.right_stride, p.out, p.out_stride, p.factor, p.rows, p.depth, p.columns);
#endif
}

inline void multiply_tile_floats(const TileProduct& p, RowPrefetch& prefetch) {
  multiply_parts({static_cast<const char*>(p.left), 4 * p.left_stride, p.right, p.right_stride, p.out, p.out_stride,
                  p.factor, p.rows, p.depth, p.columns},
                 [&](const Product& part) { multiply_tile<OfFloats>(part, prefetch); });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
