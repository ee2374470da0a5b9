// Seals whole blocks: tokens of plain caches become codes and scales of sealed blocks (affine_codes.hpp).
#pragma once

#include <cstdint>

#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu {

struct SealArgs {
  Cache key;  // of the newest tokens; plain
  Cache value;
  SealedPlane sealed_key;
  SealedPlane sealed_value;
  int64_t num_sealed = 0;  // sealed blocks
  Indices sources;
  Indices targets;
  int64_t lowest = 1;  // blocks below are refused
};

// Seals source block i of the plain caches as target block i. Raises InvalidBlock, also for a target that occurs twice,
// before anything is written.
void seal_blocks(const SealArgs& args, int64_t num_threads = 1);

}  // namespace pagecore::cpu
