// Decode with AMX: one tile of keys and at most 16 query rows.
//
//   scores^T[64 tokens][16 rows] = key . query^T      keys are read in place, 16 tokens per AMX tile
//   acc[rows][value dim] = factor * acc + weights . value
#pragma once

#include "pagecore/ops/cpu/kernels/products/multiply_amx.hpp"
#include "pagecore/ops/cpu/kernels/tiles/panels.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

static_assert(kDecodeRows == kAmxRows && kAmxRows == kLanes && kAmxDepth == kPairDepth);

// Packs bfloat16 queries [rows, stride], zero from dim to pair_padded(dim), into panel [pair_padded(dim) / 2][16], the
// right side of score_amx. Missing rows become zeros.
inline void pack_query_pairs(const uint16_t* query, int64_t stride, int64_t rows, int64_t dim, uint32_t* panel) {
  auto* to = reinterpret_cast<float*>(panel);
  for (int64_t d = 0; d < pair_padded(dim); d += 2 * kLanes, to += kLanes * kDecodeRows) {
    Vec square[kLanes];
    for (int row = 0; row < kLanes; ++row) {
      square[row] = row < rows ? load_as_float<Float::F32>(query + row * stride + d) : Vec{};
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(to + i * kDecodeRows, square[i]);
  }
}

// Sixteen keys as an AMX tile loads them, and how many of these a tile of keys has.
constexpr int kRuns = static_cast<int>(kTileTokens) / kAmxRows;
struct KeyRows {
  const char* first;
  int64_t stride;  // in bytes
};

// The keys themselves if an AMX tile can load them in place; else a copy of them in `copy` [16, pair_padded(dim)].
PC_FORCE_INLINE KeyRows key_rows(const TokenRows& keys, const char* const* rows, int begin, int64_t dim,
                                 uint16_t* copy) {
  const int64_t stride = keys.offsets[begin + 1] - keys.offsets[begin];
  bool straight = dim % kAmxDepth == 0;
  for (int i = 0; i < kAmxRows; ++i) {
    straight = straight && rows[begin + i] != nullptr && rows[begin + i] == rows[begin] + i * stride;
  }
  if (straight) return {rows[begin], stride};
  const int64_t width = pair_padded(dim);
  for (int i = 0; i < kAmxRows; ++i) {
    auto* to = reinterpret_cast<float*>(copy + i * width);
    for (int64_t at = 0; at < 2 * width; at += 4 * kLanes) {
      store(to + at / 4, load_inside<Float::F32>(rows[begin + i], at, 2 * dim));
    }
  }
  return {reinterpret_cast<const char*>(copy), 2 * width};
}

// Writes scores [rows, 64] from sums [64, 16].
inline void store_scores(const float* sums, int64_t rows, float* scores) {
  constexpr int kSquare = 4;
  for (int64_t row = 0; row < rows; row += kSquare) {
    for (int t = 0; t < kTileTokens; t += kLanes) {
      Vec of_rows[kSquare];
#pragma GCC unroll 4
      for (int i = 0; i < kSquare; ++i) {
        of_rows[i] = load_quarters(sums + (t + i) * kDecodeRows + row, kSquare * kDecodeRows);
      }
      transpose_squares(of_rows);
#pragma GCC unroll 4
      for (int i = 0; i < kSquare; ++i) {
        if (row + i == rows) break;
        store(scores + (row + i) * kTileTokens + t, of_rows[i]);
      }
    }
  }
}

// Writes scores [rows, 64], rows <= 16; unused tokens score 0. `copy` has room for 64 keys of pair_padded(dim) numbers.
// Prefetches `next_rows` meanwhile.
inline void score_amx(AmxTiles& tiles, const TokenRows& keys, const TileUse& use, const NextRows& next_rows,
                      int64_t dim, const uint32_t* query, int64_t rows, float* scores, uint16_t* copy) {
  constexpr int kGroups = static_cast<int>(kTileTokens) / kAmxRows;
  const int64_t depth = pair_padded(dim);
  const char* places[kTileTokens];
  rows_in_use(keys, use, places);
  KeyRows groups[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    groups[g] = key_rows(keys, places, g * kAmxRows, dim, copy + g * kAmxRows * depth);
  }
  tiles.set_rows(kAmxRows);
  for_each_constant<kGroups>([]<int T>() __attribute__((always_inline)) { Amx::zero<T>(); });
  for (int64_t k = 0; k < depth; k += kAmxDepth) {
    Amx::load<kRightTile>(query + k / 2 * kDecodeRows, 4 * kDecodeRows);
    for_each_constant<kGroups>([&]<int g>() __attribute__((always_inline)) {
      constexpr int kLeft = kLeftTile + g % 2;
      for (int t = g * kAmxRows; t < (g + 1) * kAmxRows; ++t) prefetch_elsewhere(next_rows, t, 2 * k, kAmxRowBytes);
      Amx::load<kLeft>(groups[g].first + 2 * k, groups[g].stride);
      Amx::multiply<g, kLeft, kRightTile>();
    });
  }
  alignas(64) float transposed[kTileTokens][kDecodeRows];
  for_each_constant<kGroups>(
      [&]<int g>() __attribute__((always_inline)) { Amx::store<g>(transposed[g * kAmxRows], sizeof(transposed[0])); });
  store_scores(transposed[0], rows, scores);
}

// Adds weights . values to acc. weights [16, 64] is bfloat16; rows from `rows` on may hold anything, and their sums are
// dropped. values [32][columns] comes from pack_value_pairs.
inline void accumulate_amx(AmxTiles& tiles, const uint16_t* weights, const uint32_t* values, int64_t columns,
                           float* acc, int64_t stride, const float* factor, int64_t rows) {
  tiles.set_rows(kAmxRows);
  const RowTile all{0, 0, rows};
  multiply_amx_rows<1>({weights, kTileTokens, values, columns, acc, stride, factor, kTileTokens, columns, kAmxRows},
                       &all);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
