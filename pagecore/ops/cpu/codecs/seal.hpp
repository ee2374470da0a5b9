// Seals whole blocks: tokens of plain caches become codes and scales of sealed blocks (affine_codes.hpp).
#pragma once

#include <cstdint>

#include "pagecore/ops/sealed_plane.hpp"

namespace pagecore::cpu {

// Seals source block i of the plain caches as target block i. Raises InvalidBlock, also for a target that occurs twice,
// before anything is written.
void seal_blocks(const SealArgs& args, int64_t num_threads = 1);

// Writes the numbers of sealed source block i to target block i of the plain caches. Raises the same errors.
void unseal_blocks(const SealArgs& args, int64_t num_threads = 1);

// The checks of the pairs alone, for calls that run on another device.
void check_sealed_pairs(const SealArgs& args, bool restores);

}  // namespace pagecore::cpu
