// Rows that become codes: the elements that a lane loads, the codes that it stores, and the range of the numbers of a
// row. code_writers.cuh has the formats.
#pragma once

#include "cuda_src/device/formats.cuh"
#include "cuda_src/device/units.cuh"
#include "cuda_src/device/write_slots.cuh"

namespace pagecore {

constexpr float kLargestFloat = 3.402823466e38f;

PC_DEVICE float min_float(float a, float b) { return -pc_max(-a, -b); }

// The codes of the row of a lane, and the lane's place in it.
struct CodeTarget {
  Global<pc_uint8> codes;
  Global<pc_uint8> scales;
  float factor;
  int dim;
  int lane;  // of the lanes that share the row
  int lanes;
  bool in_vectors;
  bool writes;

  PC_MEMBER int steps() const { return ceil_div(ceil_div(dim, 8), lanes); }
  PC_MEMBER int first(int step) const { return 8 * (step * lanes + lane); }

  // Stores the codes of elements first(step) .. + 7, one byte each.
  PC_MEMBER void store(int step, const int (&code)[8]) const {
    const int at = first(step);
    if (!writes || at >= dim) return;
    if (in_vectors) {
      pc_uint64 bytes = 0;
      PC_UNROLL
      for (int i = 0; i < 8; ++i) bytes |= static_cast<pc_uint64>(code[i] & 0xff) << 8 * i;
      codes.template as<pc_uint64>().store(at / 8, bytes);
      return;
    }
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (at + i < dim) codes.store(at + i, static_cast<pc_uint8>(code[i]));
    }
  }

  // Stores the codes of these elements, two a byte.
  PC_MEMBER void store_packed(int step, const int (&code)[8]) const {
    const int at = first(step);
    if (!writes || at >= dim) return;
    pc_uint32 bytes = 0;
    PC_UNROLL
    for (int i = 0; i < 8; ++i) bytes |= static_cast<pc_uint32>(code[i]) << 4 * i;
    if (in_vectors) {
      codes.template as<pc_uint32>().store(at / 8, bytes);
      return;
    }
    PC_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (at + 2 * i < dim) codes.store(at / 2 + i, static_cast<pc_uint8>(bytes >> 8 * i));
    }
  }

  PC_MEMBER void store_row_scale(pc_uint32 bits) const {
    if (writes && lane == 0) scales.template as<pc_uint32>().store(0, bits);
  }
  PC_MEMBER void store_group_scale(int step, int group, int byte) const {
    if (writes && first(step) < dim && first(step) % group == 0) {
      scales.store(first(step) / group, static_cast<pc_uint8>(byte));
    }
  }
};

// A row of new elements.
template <typename T>
struct CodeRow : CodeTarget {
  Global<T> elements;

  // Elements first(step) .. + 7; those past the row are 0.
  PC_MEMBER void load(int step, float (&x)[8]) const {
    const int at = first(step);
    if (in_vectors && at < dim) {
      const Unit<T, 8> unit = load_unit<T, 8, false>(elements, at);
      PC_UNROLL
      for (int i = 0; i < 8; ++i) x[i] = element(unit, i);
      return;
    }
    PC_UNROLL
    for (int i = 0; i < 8; ++i) x[i] = at + i < dim ? pc_to_float(elements.load(at + i)) : 0.0f;
  }
};

template <typename T>
PC_DEVICE CodeRow<T> load_code_row(const PcCodeParams& params, const PcCodePlane& plane) {
  CodeRow<T> row;
  const int number =
      static_cast<int>((static_cast<pc_int64>(pc_block_x()) * pc_num_threads() + pc_thread()) >> plane.lanes_shift);
  const bool exists = number < plane.num_rows;
  const int token = divide(exists ? number : 0, plane.num_heads);
  const int head = exists ? number - token * plane.num_heads.divisor : 0;
  const pc_int64 slot = exists ? load_index(params.slots, token) : -1;
  // As an unsigned number a negative slot is past the end.
  row.writes = static_cast<pc_uint64>(slot) < static_cast<pc_uint64>(params.num_slots);
  const SlotPosition position = position_of(row.writes ? slot : 0, params.block_size, params.block_shift);
  const PcCache& codes = plane.stored.codes;
  const PcScales& scales = plane.stored.scales;
  row.elements = Global<T>(plane.rows.data) + (token * plane.rows.token_stride + head * plane.rows.head_stride);
  row.codes = Global<pc_uint8>(codes.data) +
              (position.block * codes.block_stride + position.offset * codes.token_stride + head * codes.head_stride);
  row.scales = Global<pc_uint8>(scales.data);
  if (scales.data != 0) {
    row.scales = row.scales + (position.block * scales.block_stride + position.offset * scales.token_stride +
                               head * scales.head_stride);
  }
  row.factor = plane.factors != 0 ? Global<float>(plane.factors).load(head * plane.factor_stride) : plane.factor;
  row.dim = plane.dim;
  row.lanes = 1 << plane.lanes_shift;
  row.lane = pc_lane() & (row.lanes - 1);
  row.in_vectors = plane.in_vectors != 0;
  return row;
}

// The range of some numbers. NaN is ignored but for `has_nan`.
struct NumberRange {
  float low;  // at most 0
  float high;
  int has_nan;

  PC_MEMBER void add(const float (&x)[8]) {
    PC_UNROLL
    for (int i = 0; i < 8; ++i) {
      low = min_float(low, x[i]);
      high = pc_max(high, x[i]);
      has_nan |= x[i] != x[i] ? 1 : 0;
    }
  }
  // Joins the ranges of `lanes` adjacent lanes, a power of two.
  PC_MEMBER void join(int lanes) {
    for (int mask = 1; mask < lanes; mask *= 2) {
      low = min_float(low, pc_shuffle_xor(low, mask));
      high = pc_max(high, pc_shuffle_xor(high, mask));
      has_nan |= pc_shuffle_xor(has_nan, mask);
    }
    low = pc_max(low, -kLargestFloat);
    high = min_float(high, kLargestFloat);
  }
  PC_MEMBER float largest() const { return magnitude_of(pc_max(-low, high)); }  // never -0
};

PC_DEVICE NumberRange no_numbers() { return {0.0f, 0.0f, 0}; }

template <typename Row>
PC_DEVICE NumberRange range_of_row(const Row& row) {
  NumberRange range = no_numbers();
  for (int step = 0; step < row.steps(); ++step) {
    float x[8];
    row.load(step, x);
    range.add(x);
  }
  range.join(row.lanes);
  return range;
}

}  // namespace pagecore
