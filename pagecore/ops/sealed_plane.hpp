// Sealed blocks, as arguments of the kernels of host and CUDA.
#pragma once

#include <cstdint>

#include "pagecore/ops/args.hpp"

namespace pagecore {

// Keys or values of sealed blocks: codes in words of 32 bits with a scale and a least number for each group
// (cpu/codecs/affine_codes.hpp). Absent when words is null.
//
//   keys    words [block, head, row, dim]     a row has 16 or 8 tokens; scales [block, head, group, 2, dim]
//   values  words [block, row, head, words]   a row is a token; scales [block, row, head, group, 2]
struct SealedPlane {
  char* words = nullptr;
  char* scales = nullptr;
  Float scale_type = Float::F32;
  int64_t bits = 0;   // of a code; 0: absent
  int64_t group = 1;  // tokens of keys, dims of values
  int64_t block_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t scales_block_stride = 0;
  int64_t scales_head_stride = 0;
  int64_t scales_row_stride = 0;  // between groups of keys, between tokens of values
  int64_t group_stride = 0;       // between groups of values
  int64_t least_stride = 0;       // from a scale to its least number
};

// The older tokens of each sequence, in sealed blocks of the same size. Absent if a plane is.
struct SealedBlocks {
  SealedPlane key;
  SealedPlane value;
  int64_t num_blocks = 0;
  Table table;
  Indices lens;  // tokens of each sequence in sealed blocks
};

// Blocks to seal: source block i of the plain caches becomes target block i.
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

}  // namespace pagecore
