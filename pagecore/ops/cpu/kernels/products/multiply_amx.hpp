// Matrix products of bfloat16 pairs with AMX.
//
//               right: tmm6, 7  (16 pairs deep, 16 columns each)
//   left: tmm4  tmm0  tmm1          R tile rows x N tile columns of sums, R * N <= 4
//         tmm5  tmm2  tmm3
//
// Every sum starts at zero and is combined with the old output outside of the tiles. If the row count is not a multiple
// of 16, the last tile starts early: it recomputes rows that are already stored, to the same bits, and stores only its
// own rows. accumulate_amx.hpp adds to the old output inside of the tiles.
#pragma once

#include "pagecore/ops/cpu/kernels/products/multiply.hpp"
#include "pagecore/ops/cpu/kernels/simd/amx.hpp"
#if defined(PC_AMX_EMULATED)
#include "pagecore/ops/cpu/kernels/simd/amx_emulated.hpp"
#endif

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX_EMULATED)
using Amx = EmulatedAmx;
#else
using Amx = HardwareAmx;
#endif

// Configures this thread's AMX tiles for the lifetime of the object: tmm0 .. 3 hold sums, 4 and 5 left sides, 6 and 7
// right sides. A thread may have only one such object at a time.
class AmxTiles {
 public:
  AmxTiles() { configure(kAmxRows); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() { Amx::release(); }

  // Called every few hundred nanoseconds of other work, when no tile is in use: without a product for half a
  // microsecond the unit sleeps, and needs a quarter of a microsecond to wake up (Granite Rapids).
  PC_FORCE_INLINE void keep_awake() { Amx::multiply<0, 4, 6>(); }
  // Sets the row count of left sides and sums. Changing it loses the contents of the tiles.
  PC_FORCE_INLINE void set_rows(int rows) {
    if (rows != rows_) configure(rows);
  }

 private:
  void configure(int rows) {
    AmxConfig config;
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = kAmxRowBytes;
      config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kAmxRows);
    }
    Amx::configure(config);
    rows_ = rows;
  }

  int rows_ = 0;
};

constexpr int kLeftTile = 4, kRightTile = 6;
constexpr int64_t kAmxColumns = kAmxRowBytes / 4;
constexpr int64_t kAmxDepth = kAmxRowBytes / 2;

struct AmxProduct {
  const uint16_t* a;
  int64_t lda;
  const uint32_t* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  const float* factor;
  int64_t depth;
  int64_t columns;
  int64_t height;  // rows of a tile
};

// A tile holds the rows from `begin` on; rows first .. last are stored.
struct RowTile {
  int64_t begin, first, last;
};

template <int R, int N>
void multiply_amx_block(const AmxProduct& p, const RowTile* rows, int64_t column) {
  static_assert(R <= 2 && R * N <= 4);
  for_each_constant<R * N>([]<int T>() __attribute__((always_inline)) { Amx::zero<T>(); });
  for (int64_t k = 0; k < p.depth; k += kAmxDepth) {
    for_each_constant<R>([&]<int r>() __attribute__((always_inline)) {
      Amx::load<kLeftTile + r>(p.a + rows[r].begin * p.lda + k, 2 * p.lda);
    });
    for_each_constant<N>([&]<int n>() __attribute__((always_inline)) {
      constexpr int kRight = kRightTile + n % 2;
      Amx::load<kRight>(p.b + k / 2 * p.ldb + column + n * kAmxColumns, 4 * p.ldb);
      for_each_constant<R>([]<int r>()
                               __attribute__((always_inline)) { Amx::multiply<r * N + n, kLeftTile + r, kRight>(); });
    });
  }
  bool whole = p.factor == nullptr;
  for (int r = 0; r < R; ++r) whole = whole && rows[r].last == rows[r].begin + p.height;
  if (whole) {
    for_each_constant<R * N>([&]<int T>() __attribute__((always_inline)) {
      Amx::store<T>(p.c + rows[T / N].begin * p.ldc + column + T % N * kAmxColumns, 4 * p.ldc);
    });
    return;
  }
  alignas(64) float sums[R][kAmxRows][N * kAmxColumns];
  for_each_constant<R * N>([&]<int T>() __attribute__((always_inline)) {
    Amx::store<T>(&sums[T / N][0][T % N * kAmxColumns], sizeof(sums[0][0]));
  });
  for (int r = 0; r < R; ++r) {
    for (int64_t row = rows[r].first; row < rows[r].last; ++row) {
      const float* sum = sums[r][row - rows[r].begin];
      float* out = p.c + row * p.ldc + column;
      const float* factor = p.factor == nullptr ? nullptr : p.factor + row;
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) add_product(out + n * kAmxColumns, load(sum + n * kAmxColumns), factor);
    }
  }
}

template <int R>
void multiply_amx_rows(const AmxProduct& p, const RowTile* rows) {
  constexpr int kWide = 4 / R;
  int64_t column = 0;
  for (; column + kWide * kAmxColumns <= p.columns; column += kWide * kAmxColumns) {
    multiply_amx_block<R, kWide>(p, rows, column);
  }
  switch ((p.columns - column) / kAmxColumns) {
    case 1: return multiply_amx_block<R, 1>(p, rows, column);
    case 2:
      if constexpr (kWide > 2) multiply_amx_block<R, 2>(p, rows, column);
      return;
    case 3:
      if constexpr (kWide > 2) multiply_amx_block<R, 3>(p, rows, column);
      return;
    default: return;
  }
}

inline void multiply_amx(AmxTiles& tiles, const AmxProduct& p, int64_t rows) {
  if (rows == 0) return;
  tiles.set_rows(static_cast<int>(p.height));
  for (int64_t row = 0; row < rows; row += 2 * kAmxRows) {
    RowTile both[2];
    for (int r = 0; r < 2; ++r) {
      const int64_t first = row + r * kAmxRows;
      const int64_t begin = first < rows - p.height ? first : rows - p.height;
      both[r] = {begin, first, begin + p.height};
    }
    if (both[1].first < rows) {
      multiply_amx_rows<2>(p, both);
    } else {
      multiply_amx_rows<1>(p, both);
    }
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
