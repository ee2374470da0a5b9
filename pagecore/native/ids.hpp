// The integer types of the index, and the two reserved ids.
#pragma once

#include <cstdint>

namespace pagecore {

using BlockId = int32_t;     // a block of a pool
using RowId = int32_t;       // row of a sequence in the block tables
using TokenCount = int32_t;  // lengths and counts of tokens
using SlotId = int64_t;      // block * block_size + offset

inline constexpr BlockId kNullBlock = 0;    // counted in num_blocks, never allocated
inline constexpr SlotId kPaddingSlot = -1;  // marks a token that is not written

}  // namespace pagecore
