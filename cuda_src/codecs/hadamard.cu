// The Walsh-Hadamard transform of the blocks of rows, in float32.
//
//   block of 128 numbers   | lane 0: 0 .. 7 | lane 1: 8 .. 15 | ... | lane 15: 120 .. 127 |
//
// A lane holds 8 adjacent numbers in registers, and 1 to 32 lanes of a warp a block of 8 to 256. The steps h = 1, 2, 4
// are sums and differences within a lane, those from 8 on shuffles between lanes h / 8 apart. Each number is read and
// written once; a block is read as a whole before any of it is written, so that source and target may be one array.
// The order of the steps is that of the host, and so are the bits.
#include "cuda_src/abi/hadamard.h"
#include "cuda_src/device/units.cuh"

namespace pagecore {

constexpr int kNumbers = PC_HADAMARD_NUMBERS;

// The numbers of a lane in both arrays.
template <typename T>
struct LaneRow {
  Global<T> source;
  Global<T> target;
};

template <typename T>
PC_DEVICE LaneRow<T> lane_row(const PcHadamardParams& params, int block, int lane) {
  const int row = divide(block, params.blocks_per_row), of_row = block - row * params.blocks_per_row.divisor;
  const int outer = divide(row, params.inner), inner = row - outer * params.inner.divisor;
  const int first = ((of_row << params.lanes_shift) + lane) * kNumbers;
  const Global<pc_uint8> source(params.source), target(params.target);
  return {
      (source + (outer * params.source_outer_stride + inner * params.source_inner_stride)).template as<T>() + first,
      (target + (outer * params.target_outer_stride + inner * params.target_inner_stride)).template as<T>() + first};
}

template <typename T>
PC_DEVICE void load_numbers(const Global<T>& source, bool in_units, float (&x)[kNumbers]) {
  if (in_units) {
    const Unit<T, kNumbers> unit = load_unit<T, kNumbers, false>(source, 0);
    PC_UNROLL
    for (int i = 0; i < kNumbers; ++i) x[i] = element(unit, i);
  } else {
    PC_UNROLL
    for (int i = 0; i < kNumbers; ++i) x[i] = element(load_unit<T, 1, false>(source, i), 0);
  }
}

template <typename T>
PC_DEVICE void store_numbers(const Global<T>& target, bool in_units, const float (&x)[kNumbers]) {
  if (in_units) {
    store_unit(target, 0, unit_of<T>(x));
  } else {
    PC_UNROLL
    for (int i = 0; i < kNumbers; ++i) {
      const float one[1] = {x[i]};
      store_unit(target, i, unit_of<T>(one));
    }
  }
}

PC_DEVICE void transform(float (&x)[kNumbers], int lane, int lanes) {
  PC_UNROLL
  for (int step = 1; step < kNumbers; step *= 2) {
    PC_UNROLL
    for (int i = 0; i < kNumbers; ++i) {
      if ((i & step) != 0) continue;
      const float low = x[i], high = x[i + step];
      x[i] = low + high;
      x[i + step] = low - high;
    }
  }
  for (int step = 1; step < lanes; step *= 2) {  // fault: hadamard_lanes
    PC_UNROLL
    for (int i = 0; i < kNumbers; ++i) {
      const float other = pc_shuffle_xor(x[i], step);
      x[i] = (lane & step) != 0 ? other - x[i] : x[i] + other;  // fault: hadamard_sign
    }
  }
}

template <typename T>
PC_KERNEL(PC_HADAMARD_THREADS, 4)
void hadamard(const PcHadamardParams params) {
  const int lanes = 1 << params.lanes_shift, lane = pc_thread() & (lanes - 1);
  const int block = (pc_block_x() * PC_HADAMARD_THREADS + pc_thread()) >> params.lanes_shift;
  const bool is_inside = block < params.num_blocks;  // fault: hadamard_end
  float x[kNumbers] = {};
  LaneRow<T> row = {};
  if (is_inside) {
    row = lane_row<T>(params, block, lane);
    load_numbers(row.source, params.in_units != 0, x);
  }
  transform(x, lane, lanes);
  PC_UNROLL
  for (int i = 0; i < kNumbers; ++i) x[i] *= params.scale;
  if (is_inside) store_numbers(row.target, params.in_units != 0, x);
}

}  // namespace pagecore
