// Copies within a cache that are larger than the caches of a core.
#pragma once

#include <vector>

#include "pagecore/ops/cpu/moves.hpp"

namespace pagecore::cpu {

// Copies part `part` of `num_parts` of each block with streaming stores, which do not read the target first. A run
// counts blocks. Precondition: no block is written twice, or both read and written.
void stream_copies(const BlockArray& array, const std::vector<CopyRun>& runs, int64_t part, int64_t num_parts);

}  // namespace pagecore::cpu
