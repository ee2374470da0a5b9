// Decode by AMX: one tile of the cache and at most 16 query rows.
//
//   scores^T[64 tokens][16 rows] = key . query^T      keys straight from the cache, 16 tokens a tile
//   acc[rows][value dim] = factor * acc + weights . value
#pragma once

#include "pagecore/ops/cpu/kernels/multiply_tiles.hpp"
#include "pagecore/ops/cpu/kernels/panels.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

static_assert(kDecodeRows == kTileRows && kTileRows == kLanes && kTileDepth == kPairDepth);

// query [rows, stride] of bfloat16, zeros from dim to pair_padded(dim) -> panel [pair_padded(dim) / 2][16]: the right
// side of score_tile_amx. Rows that are missing become zeros.
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

// Sixteen tokens as a tile takes them.
struct KeyRows {
  const char* first;
  int64_t stride;  // in bytes
};

// Where they lie, if they can be read as a tile from there; else from `copy` [16, pair_padded(dim)].
PC_FORCE_INLINE KeyRows key_rows(const Tokens& keys, const char* const* rows, int begin, int64_t dim, uint16_t* copy) {
  const int64_t stride = keys.offsets[begin + 1] - keys.offsets[begin];
  bool straight = dim % kTileDepth == 0;
  for (int i = 0; i < kTileRows; ++i) {
    straight = straight && rows[begin + i] != nullptr && rows[begin + i] == rows[begin] + i * stride;
  }
  if (straight) return {rows[begin], stride};
  const int64_t width = pair_padded(dim);
  for (int i = 0; i < kTileRows; ++i) {
    auto* to = reinterpret_cast<float*>(copy + i * width);
    for (int64_t at = 0; at < 2 * width; at += 4 * kLanes) {
      store(to + at / 4, load_inside<Float::F32>(rows[begin + i], at, 2 * dim));
    }
  }
  return {reinterpret_cast<const char*>(copy), 2 * width};
}

// scores [rows, 64], rows <= 16; those of tokens that are not used are zeros. `copy` has room for 64 keys of
// pair_padded(dim) numbers. What is `ahead` is fetched meanwhile.
inline void score_tile_amx(Tiles& tiles, const Tokens& keys, const TileUse& use, const Ahead& ahead, int64_t dim,
                           const uint32_t* query, int64_t rows, float* scores, uint16_t* copy) {
  constexpr int kGroups = static_cast<int>(kTileTokens) / kTileRows;
  const int64_t depth = pair_padded(dim);
  const char* places[kTileTokens];
  used_rows(keys, use, places);
  KeyRows groups[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    groups[g] = key_rows(keys, places, g * kTileRows, dim, copy + g * kTileRows * depth);
  }
  tiles.set_rows(kTileRows);
  for_each_constant<kGroups>([]<int T>() __attribute__((always_inline)) { Amx::zero<T>(); });
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    Amx::load<kRightTile>(query + k / 2 * kDecodeRows, 4 * kDecodeRows);
    for_each_constant<kGroups>([&]<int g>() __attribute__((always_inline)) {
      constexpr int kLeft = kLeftTile + g % 2;
      for (int t = g * kTileRows; t < (g + 1) * kTileRows; ++t) ask_elsewhere(ahead, t, 2 * k, kTileBytes);
      Amx::load<kLeft>(groups[g].first + 2 * k, groups[g].stride);
      Amx::multiply<g, kLeft, kRightTile>();
    });
  }
  alignas(64) float transposed[kTileTokens][kDecodeRows];
  for_each_constant<kGroups>(
      [&]<int g>() __attribute__((always_inline)) { Amx::store<g>(transposed[g * kTileRows], sizeof(transposed[0])); });
  for (int t = 0; t < kTileTokens; t += kTileRows) {
    Vec square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = load(transposed[t + i]);
    transpose(square);
    for (int row = 0; row < rows; ++row) store(scores + row * kTileTokens + t, square[row]);
  }
}

// weights [16, 64] of bfloat16, anything in the rows behind `rows`, whose sums are dropped; values: pack_value_pairs,
// [32][columns].
inline void value_tile_amx(Tiles& tiles, const uint16_t* weights, const uint32_t* values, int64_t columns, float* acc,
                           int64_t stride, const float* factor, int64_t rows) {
  tiles.set_rows(kTileRows);
  const TileRows all{0, 0, rows};
  multiply_tile_rows<1>({weights, kTileTokens, values, columns, acc, stride, factor, kTileTokens, columns, kTileRows},
                        &all);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
