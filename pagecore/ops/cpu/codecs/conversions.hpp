// Conversions of stored rows between formats, without a copy of more than a block of numbers for each thread.
#pragma once

#include <cstdint>
#include <vector>

#include "pagecore/ops/cpu/latent/latent.hpp"
#include "pagecore/ops/cpu/ops.hpp"

namespace pagecore::cpu {

// Two caches with equal block sizes, heads and dims. Factors are given ones, for each head; absent: 1. Not both are
// plain.
struct BlockConversion {
  Cache source;
  Cache target;
  const float* source_factors = nullptr;
  const float* target_factors = nullptr;
  bool copies = false;  // format and factors are equal, and bytes are copied
};

// Two latent caches with equal block sizes and dims; rope follows the latent in rows of plain numbers and E4M3.
struct LatentConversion {
  LatentCache source;
  LatentCache target;
  float source_factor = 1.0f;
  float target_factor = 1.0f;
};

// Converts block source_ids[i] of each source to block target_ids[i] of its target; of several pairs with one target
// the last one counts. Raises InvalidBlock, also for blocks below `lowest`, before anything is written. Then runs
// `copies`, those of the call's other caches.
void convert_blocks(const std::vector<BlockConversion>& caches, const std::vector<LatentConversion>& latents,
                    const PlannedMoves& copies, const Indices& source_ids, const Indices& target_ids,
                    int64_t num_threads = 1, int64_t lowest = 1);

// Converts every row of a cache whose blocks have one token.
void convert_latent_rows(const LatentConversion& rows, int64_t num_threads = 1);

}  // namespace pagecore::cpu
