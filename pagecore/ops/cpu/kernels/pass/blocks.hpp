// Many rows of one head and one tile: keys and values are packed once, and then a block of rows at a time takes all
// steps, so that its scores, weights and sums stay in the first cache.
#pragma once

#include "pagecore/ops/cpu/kernels/pass/accumulate.hpp"
#include "pagecore/ops/cpu/kernels/pass/score.hpp"
#include "pagecore/ops/cpu/kernels/pass/softmax.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

constexpr int64_t kRowsOfBlock = 32;

// True if a pass takes its rows in blocks. It then has one head, whose tiles are all packed.
inline bool takes_blocks(const Pass& pass) { return pass.rows > kRowsOfBlock; }
static_assert(kRowsOfBlock >= kPackRows && kPassRows / (kRowsOfBlock + 1) <= 1);

// Attends to a tile. The last block has up to kRowsOfBlock rows more.
inline void attend_blocks(Pass& pass, const Tile& tile, const Tile* next_tile) {
  pack_tile_keys(pass, tile, 0, pass.next_rows_at(pass.values, tile.values, 0));
  const NextRows next = next_tile == nullptr ? NextRows{} : pass.next_rows_at(pass.keys, next_tile->keys, 0);
  const PackedValues values = pack_tile_values(pass, tile, 0, next);
  const TokenFactors factors = factors_of(pass, tile, 0);
  const RowRange all = pass.active_rows();
  for (int64_t row = all.first; row < all.last;) {
    const RowRange block = {row, all.last - row < 2 * kRowsOfBlock ? all.last : row + kRowsOfBlock};
    multiply_packed_keys(pass, pass.rows_of(0, block));
    softmax(pass, tile, 0, block, factors, {});
    accumulate_packed(pass, 0, block, values);
    row = block.last;
  }
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
