// Rows that the Hadamard transform changes, as arguments of the kernels of host and CUDA.
#pragma once

#include <cstdint>

#include "pagecore/ops/args.hpp"

namespace pagecore {

// Limits of a block of the transform. The host has vectors of up to 16 numbers; a warp holds 32 times 8.
inline constexpr int64_t kHadamardMin = 8, kHadamardMax = 256;

// The numbers of a block of a row: the largest power of two that divides `dim`, up to kHadamardMax.
PC_FORCE_INLINE int64_t hadamard_block(int64_t dim) {
  const int64_t power = dim & -dim;
  return power < kHadamardMax ? power : kHadamardMax;
}

// Rows [outer, inner] of `dim` contiguous numbers. Source and target have one dtype, and are one array or share no
// byte.
struct HadamardRows {
  const char* source = nullptr;
  char* target = nullptr;
  Float type = Float::F32;
  int64_t outer = 0;
  int64_t inner = 0;
  int64_t dim = 0;                  // a multiple of kHadamardMin
  int64_t source_outer_stride = 0;  // bytes
  int64_t source_inner_stride = 0;
  int64_t target_outer_stride = 0;
  int64_t target_inner_stride = 0;
};

}  // namespace pagecore
