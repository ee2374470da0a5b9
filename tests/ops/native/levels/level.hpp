// The kernels of PC_ISA, exported for the drivers.
#pragma once

#include "pagecore/ops/cpu/kernels/products/multiply_pairs.hpp"
#include "pagecore/ops/cpu/kernels/rows/quantize_groups.hpp"
#include "pagecore/ops/cpu/kernels/tiles/panels.hpp"
#if defined(PC_AMX)
#include "pagecore/ops/cpu/kernels/products/decode_amx.hpp"
#endif
#include "tests/ops/native/levels/products.hpp"

namespace pagecore::test::PC_ISA {
namespace {

using namespace cpu::PC_ISA;

TokenRows tokens_of(const TileView& tile) { return {tile.base, tile.offsets}; }
TileUse use_of(const TileView& tile) { return {tile.first, tile.last, tile.used}; }
// Prefetching changes nothing, at any address.
NextRows next_rows_of(const TileView& tile, int64_t row_bytes) { return {0, tokens_of(tile), row_bytes, {}}; }

void pack_any_keys(Float type, const TileView& tile, int64_t dim, float* panel) {
  with_float(type, [&]<Float T>() {
    pack_keys<T>(tokens_of(tile), use_of(tile), dim, panel, next_rows_of(tile, dim * kSize<T>));
  });
}
bool pack_any_values(Float type, const TileView& tile, int64_t dim, float* panel) {
  return with_float(type, [&]<Float T>() {
    return pack_values<T>(tokens_of(tile), use_of(tile), dim, panel, next_rows_of(tile, dim * kSize<T>));
  });
}

void multiply_in_parts(int64_t first_rows, const uint16_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c,
                       int64_t ldc, const float* factor, int64_t rows, int64_t depth, int64_t columns) {
  AmxTiles tiles;
  multiply_pairs(tiles, a, lda, b, ldb, c, ldc, factor, first_rows, depth, columns);
  const float* rest = factor == nullptr ? nullptr : factor + first_rows;
  multiply_pairs(tiles, a + first_rows * lda, lda, b, ldb, c + first_rows * ldc, ldc, rest, rows - first_rows, depth,
                 columns);
}

bool are_usual(float magnitude, const char* numbers, int64_t rows, int64_t groups, char* codes, char* scales) {
  const auto scale_of = [=](IntVec amax, IntVec& bytes, Vec& factor, Vec&) __attribute__((always_inline)) {
    bytes = IntVec{};
    factor = (Vec)amax;
    return (IntVec)((Vec)amax != magnitude);
  };
  bool all = true;
  const auto codes_of = [&](auto usual) {
    all = all && decltype(usual)::value;
    return [](const char*, const float*, const float*) __attribute__((always_inline)) { return Bytes{}; };
  };
  const int64_t dim = 16 * groups;
  for_each_group<Float::BF16, 16, 2, false>({numbers, codes, scales, 2 * dim, dim / 2, groups, rows, dim, 1.0f},
                                            scale_of, codes_of);
  return all;
}

#if defined(PC_AMX)
void score_keys(const TileView& keys, int64_t dim, const uint16_t* query, int64_t stride, int64_t rows, uint32_t* panel,
                uint16_t* copy, float* scores) {
  pack_query_pairs(query, stride, rows, dim, panel);
  AmxTiles tiles;
  score_amx(tiles, tokens_of(keys), use_of(keys), next_rows_of(keys, 2 * dim), dim, panel, rows, scores, copy);
}

void accumulate_values(const uint16_t* weights, const uint32_t* values, int64_t columns, float* acc, int64_t stride,
                       const float* factor, int64_t rows) {
  AmxTiles tiles;
  accumulate_amx(tiles, weights, values, columns, acc, stride, factor, rows);
}

void multiply_bytes(const int8_t* left, const int8_t* right, int32_t* sums) {
  AmxTiles tiles;
  Amx::load<0>(sums, kAmxRowBytes);
  Amx::load<kLeftTile>(left, kAmxRowBytes);
  Amx::load<kRightTile>(right, kAmxRowBytes);
  Amx::multiply_bytes<0, kLeftTile, kRightTile>();
  Amx::store<0>(sums, kAmxRowBytes);
}

void load_unconfigured() {
  const float row[kAmxColumns] = {};
  Amx::load<0>(row, 0);
}

void multiply_mismatched() {
  AmxConfig config;
  config.palette = 1;
  for (int tile = 0; tile < 3; ++tile) {
    config.row_bytes[tile] = kAmxRowBytes;
    config.rows[tile] = static_cast<uint8_t>(kAmxRows - tile);
  }
  Amx::configure(config);
  Amx::multiply<0, 1, 2>();
}
#else
constexpr decltype(Products::score_amx) score_keys = nullptr;
constexpr decltype(Products::accumulate_amx) accumulate_values = nullptr;
constexpr decltype(Products::multiply_bytes) multiply_bytes = nullptr;
constexpr decltype(Products::load_unconfigured) load_unconfigured = nullptr;
constexpr decltype(Products::multiply_mismatched) multiply_mismatched = nullptr;
#endif

}  // namespace

#define PC_NAME_OF(level) #level
#define PC_NAME(level) PC_NAME_OF(level)

const Products kProducts = {
    PC_NAME(PC_ISA),
    kHasPairs,
    pack_any_keys,
    [](const TileView& tile, int64_t dim, uint32_t* panel) {
      pack_key_pairs(tokens_of(tile), use_of(tile), dim, panel);
    },
    pack_any_values,
    [](const TileView& tile, int64_t dim, uint32_t* panel) {
      return pack_value_pairs(tokens_of(tile), use_of(tile), dim, panel);
    },
    multiply_floats,
    multiply_in_parts,
    score_keys,
    accumulate_values,
    multiply_bytes,
    load_unconfigured,
    multiply_mismatched,
    are_usual,
};

}  // namespace pagecore::test::PC_ISA
