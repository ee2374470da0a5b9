// Values that are infinite or NaN. A weight of 0 does not hide them: 0 * NaN is NaN. Keys that no query of an item
// attends to are never loaded, zeros stand in their place. Where some queries attend to a key and others do not, a tile
// is looked through first: what such keys give is added by hand to the rows that attend to them, and zeros take their
// place before the tile is multiplied.
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

template <typename T>
PC_DEVICE float low_of(pc_uint32 pair) {
  return pc_to_float(T{static_cast<pc_uint16>(pair)});
}
template <typename T>
PC_DEVICE float high_of(pc_uint32 pair) {
  return pc_to_float(T{static_cast<pc_uint16>(pair >> 16)});
}

// The bits that any lane has.
PC_DEVICE int or_of_warp(int bits) {
  PC_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) bits |= pc_shuffle_xor(bits, mask);
  return bits;
}

}  // namespace pagecore
