// Moves of tokens between slots of the same planes.
#pragma once

#include <cstdint>
#include <vector>

#include "pagecore/ops/args.hpp"

namespace pagecore::cpu {

// Moves slot sources[i] of each array [block, token, ...] to slot targets[i], in order of i. The caller has checked
// the slots, and calls kernels() before: nothing fails here.
void move_slots(const std::vector<BlockArray>& arrays, const int64_t* sources, const int64_t* targets, int64_t count,
                int64_t num_threads) noexcept;

// Keys of a cache and the bounds of their blocks.
struct BoundedKeys {
  Cache key;
  Cache low;  // one "token" a block
  Cache high;
};

// Computes the bounds of blocks anew from their first tokens: `count` slots, in runs that each begin with the first
// slot of a block and continue with the slots that follow it.
void renew_bounds(const std::vector<BoundedKeys>& planes, const int64_t* slots, int64_t count,
                  int64_t num_threads) noexcept;

}  // namespace pagecore::cpu
