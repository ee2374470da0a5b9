// How large the packed tiles of kernels/panels.hpp are: for whoever makes room for them. In numbers of four bytes.
#pragma once

#include "pagecore/ops/cpu/kernel_table.hpp"

namespace pagecore::cpu {

// Pairs of bfloat16 are multiplied 32 numbers at a time: a row of one of AMX's tiles.
inline constexpr int64_t kPairDepth = 32;

// What a row of bfloat16 that meets a panel of pairs is padded to, with zeros.
PC_FORCE_INLINE int64_t pair_padded(int64_t dim) { return (dim + kPairDepth - 1) / kPairDepth * kPairDepth; }

PC_FORCE_INLINE int64_t key_panel_size(int64_t dim) { return padded(dim) * kTileTokens; }
PC_FORCE_INLINE int64_t key_pairs_size(int64_t dim) { return pair_padded(dim) / 2 * kTileTokens; }
PC_FORCE_INLINE int64_t value_panel_size(int64_t dim) { return kTileTokens * padded(dim); }
PC_FORCE_INLINE int64_t value_pairs_size(int64_t dim) { return kTileTokens / 2 * padded(dim); }

}  // namespace pagecore::cpu
