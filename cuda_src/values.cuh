// Values that are not numbers. A weight of 0 does not hide them: 0 * NaN is NaN. Keys that no query of an item attends
// to are never loaded, zeros stand in their place. Where some queries attend to a key and others do not, a tile is
// looked through first, and if it holds a NaN or an infinity it is multiplied for one query after another.
#pragma once

#include "scores.cuh"

namespace pagecore {

// The exponents of two neighbours, and the lowest bit of each.
template <typename T>
struct Exponents;
template <>
struct Exponents<pc_bfloat16> {
  static constexpr pc_uint32 kBits = 0x7f807f80u, kUnit = 0x00800080u;
};
template <>
struct Exponents<pc_half> {
  static constexpr pc_uint32 kBits = 0x7c007c00u, kUnit = 0x04000400u;
};

// Whether one of two neighbours is infinite or NaN: all bits of its exponent are set, and one more carries.
template <typename T>
PC_DEVICE bool is_not_finite(pc_uint32 pair) {
  return (((pair & Exponents<T>::kBits) + Exponents<T>::kUnit) & 0x80008000u) != 0;
}

// What is left of a right operand of pc_multiply, whose rows are keys, for one query.
struct PairMask {
  pc_uint32 low;   // keys j and j + 1
  pc_uint32 high;  // keys j + 8 and j + 9
};

template <typename Options>
PC_DEVICE PairMask mask_pairs(const PcAttentionParams& p, const ScoreRow& row, int j) {
  PairMask mask = {0, 0};
  if (attends<Options>(p, row, j)) mask.low |= 0x0000ffffu;
  if (attends<Options>(p, row, j + 1)) mask.low |= 0xffff0000u;
  if (attends<Options>(p, row, j + 8)) mask.high |= 0x0000ffffu;
  if (attends<Options>(p, row, j + 9)) mask.high |= 0xffff0000u;
  return mask;
}

}  // namespace pagecore
