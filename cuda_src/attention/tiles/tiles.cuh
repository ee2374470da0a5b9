// Tiles of 16-bit elements in shared memory: the placement of rows, and values that are infinite or NaN.
#pragma once

#include "cuda_src/device/primitives.cuh"
#include "cuda_src/shapes/attention.h"

namespace pagecore {

// ---- rows

// A row of keys, values or queries as the matrix kernels keep it in shared memory.
//
// A row has kDim elements, of which a call uses the first `dim`; both are multiples of 8. cp.async copies 16-byte
// chunks. Chunks past `dim` are not read from the cache but filled with zeros, so that products with the padding add
// nothing.
//
//                 dim               kDim        pitch
//   chunks    | c | c | c | c | c | 0 | 0 | 0 | 0 |    read from the cache, or zero
//
// The pitch is a multiple of 128 bytes, which is all 32 banks. Chunk c of row r is stored at c ^ (r % 8), so that
// copies write, and ldmatrix reads, eight rows of one column without a bank conflict.
template <int kDim>
struct TileRow {
  static constexpr int kBytes = pc_row_bytes(kDim);
  static constexpr int kChunks = kBytes / 16;
  // Lanes that copy a row together, a power of two. Lanes from kChunks on copy nothing.
  static constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;

  static_assert(kDim % 32 == 0 && kChunks <= 32, "the sums of a row are exchanged in groups of 32 dims");

  PC_MEMBER static int at(int row, int chunk) { return row * kBytes + ((chunk ^ (row & 7)) << 4); }
  // Moves an address by `rows`, a multiple of a power of two above the row that it is in. The addresses of a lane then
  // differ by constants, so that one register serves all of them.
  PC_MEMBER static SharedAddress below(SharedAddress address, int rows) {
    return (address ^ ((rows & 7) << 4)) + rows * kBytes;  // fault: swizzle_of_copies
  }
  // Moves an address by an even number of chunks.
  PC_MEMBER static SharedAddress right_of(SharedAddress address, int chunks) {
    return (address ^ ((chunks & 7) << 4)) + ((chunks & ~7) << 4);  // fault: swizzle_of_reads
  }
};

// ---- infinite values and NaN
//
// A weight of 0 does not hide such a value: 0 * NaN is NaN. Keys that no query of an item attends to are not loaded;
// their rows are zero. For a tile with keys that only some queries attend to, the tile is scanned first: contributions
// of non-finite values are added with scalar FMAs to the rows that attend to them, and the values are replaced by zero
// before the matrix instructions.

// Masks of the exponents of two adjacent elements, and the lowest bit of each exponent.
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

// Returns true if one of two adjacent elements is infinite or NaN: all bits of its exponent are set, so that one more
// carries into the sign bit.
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

// Returns the bitwise or over the lanes of the warp.
PC_DEVICE int or_of_warp(int bits) {
  PC_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) bits |= pc_shuffle_xor(bits, mask);
  return bits;
}

}  // namespace pagecore
