// Runs of tokens that a batch of sequences occupies in a paged cache, with ids and lengths checked.
#pragma once

#include <cstdint>
#include <vector>

#include "pagecore/ops/cpu/args.hpp"
#include "pagecore/ops/cpu/moves.hpp"

namespace pagecore::cpu {

// Returns the sum of the lengths. Raises ShapeError if a length is negative, exceeds int32, or does not fit `width`
// blocks.
[[nodiscard]] int64_t total_tokens(const Indices& seq_lens, int64_t width, int64_t block_size);

// Packed sequences and their block table. Each id is read once, so that the checked id is the one used.
struct PackedSequences {
  Table table;
  Indices seq_lens;
  Indices rows;  // absent: sequence i is row i of the table
  int64_t block_size = 1;
  int64_t num_blocks = 0;  // blocks of the smallest cache
  int64_t num_tokens = 0;  // tokens of the packed arrays
  int64_t lowest = 1;      // blocks below are holes: 1 for caches with a null block, otherwise 0
};

enum class Direction { Gather, Scatter };

// Fills `runs` (cleared first), joining consecutive blocks. Holes become zeros when gathering and are skipped when
// scattering. Returns the number of copied tokens. Raises before anything is written.
int64_t list_runs(const PackedSequences& batch, Direction direction, std::vector<CopyRun>& runs);

// list_runs for pairs of blocks of two caches with at least `num_sources` and `num_targets` blocks. Blocks below
// `lowest` are refused. Returns the number of pairs.
int64_t list_pairs(const Indices& sources, const Indices& targets, int64_t num_sources, int64_t num_targets,
                   int64_t lowest, std::vector<CopyRun>& runs);

}  // namespace pagecore::cpu
