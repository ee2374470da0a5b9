// Includes the kernels of PC_ISA, as isa/*.cpp do, and exports them for the drivers.
#pragma once

#include "pagecore/ops/cpu/kernels/multiply_pairs.hpp"
#include "pagecore/ops/cpu/kernels/panels.hpp"
#include "tests/ops/native/levels/products.hpp"

namespace pagecore::test::PC_ISA {
namespace {

using namespace cpu::PC_ISA;
using cpu::Float;

Tokens tokens_of(const TileView& tile) { return {tile.base, tile.offsets}; }
TileUse use_of(const TileView& tile) { return {tile.first, tile.last, tile.used}; }

void pack_any_keys(Float type, const TileView& tile, int64_t dim, float* panel) {
  with_float(type, [&]<Float T>() { pack_keys<T>(tokens_of(tile), use_of(tile), dim, panel); });
}
bool pack_any_values(Float type, const TileView& tile, int64_t dim, float* panel) {
  return with_float(type, [&]<Float T>() { return pack_values<T>(tokens_of(tile), use_of(tile), dim, panel); });
}

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
    multiply_pairs,
};

}  // namespace pagecore::test::PC_ISA
