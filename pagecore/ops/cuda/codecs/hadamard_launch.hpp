// Launch of the Hadamard transform of rows.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda_src/abi/hadamard.h"
#include "pagecore/native/checks.hpp"
#include "pagecore/native/rounding.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"
#include "pagecore/ops/hadamard_rows.hpp"

namespace pagecore::cuda {

struct HadamardLaunch {
  PcHadamardParams params = {};
  int64_t num_thread_blocks = 0;
};

[[nodiscard]] inline HadamardLaunch hadamard_launch(const HadamardRows& rows) {
  const int64_t block = hadamard_block(rows.dim), lanes = block / PC_HADAMARD_NUMBERS;
  const int64_t per_row = rows.dim / block, count = rows.outer * rows.inner;
  PC_EXPECTS(count <= kMaxUnits / (per_row * lanes), ShapeError, "x has ", count, " rows of ", rows.dim,
             " numbers; on CUDA a call transforms fewer than ", kMaxUnits * PC_HADAMARD_NUMBERS,
             " numbers: split the call");
  const uint64_t bits = address_of(rows.source) | address_of(rows.target) | bits_of(rows.source_outer_stride) |
                        bits_of(rows.source_inner_stride) | bits_of(rows.target_outer_stride) |
                        bits_of(rows.target_inner_stride);
  HadamardLaunch launch;
  PcHadamardParams& params = launch.params;
  params.source = address_of(rows.source);
  params.target = address_of(rows.target);
  params.source_outer_stride = rows.source_outer_stride;
  params.source_inner_stride = rows.source_inner_stride;
  params.target_outer_stride = rows.target_outer_stride;
  params.target_inner_stride = rows.target_inner_stride;
  params.blocks_per_row = make_divisor(per_row);
  params.inner = make_divisor(rows.inner);
  params.num_blocks = static_cast<pc_int32>(count * per_row);
  params.lanes_shift = std::countr_zero(bits_of(lanes));
  params.in_units = allows(bits, 16) ? 1 : 0;
  params.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  launch.num_thread_blocks = ceil_div(count * per_row * lanes, int64_t{PC_HADAMARD_THREADS});
  return launch;
}

}  // namespace pagecore::cuda
