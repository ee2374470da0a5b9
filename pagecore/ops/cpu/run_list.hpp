// Which tokens of a paged cache a batch of sequences holds: ids and lengths checked, and joined into runs.
#pragma once

#include <cstdint>
#include <vector>

#include "pagecore/ops/cpu/args.hpp"
#include "pagecore/ops/cpu/moves.hpp"

namespace pagecore::cpu {

// The sum of the lengths. Raises ShapeError for one that no sequence has, or that `width` blocks do not hold.
[[nodiscard]] int64_t total_tokens(const Indices& seq_lens, int64_t width, int64_t block_size);

// What a block table says of packed sequences. Ids are read once, so that what was checked is what is used.
struct PackedSequences {
  Table table;
  Indices seq_lens;
  Indices rows;  // absent: sequence i is row i of the table
  int64_t block_size = 1;
  int64_t num_blocks = 0;  // of the smallest cache
  int64_t num_tokens = 0;  // that the packed side has
};

enum class Direction { Gather, Scatter };

// Fills `runs` (cleared first): blocks that follow one another are joined; null blocks give zeros when gathering and
// are left out when scattering. Returns the number of tokens that are copied. Raises before anything is written.
int64_t list_runs(const PackedSequences& batch, Direction direction, std::vector<Run>& runs);

// The same for pairs of blocks of two caches with at least `num_sources` and `num_targets` blocks; returns their
// number.
int64_t list_pairs(const Indices& sources, const Indices& targets, int64_t num_sources, int64_t num_targets,
                   std::vector<Run>& runs);

}  // namespace pagecore::cpu
