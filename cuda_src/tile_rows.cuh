// Rows of 16-bit elements in shared memory, as the matrix kernels keep keys, values and queries.
//
// A row has kDim elements, of which a call uses the first `dim`; both are multiples of 8. cp.async moves 16-byte chunks
// and reads none past `dim`: it writes zeros instead, so that products with the padding add nothing.
//
//                 dim               kDim        kPitch
//   chunks    | c | c | c | c | c | 0 | 0 | 0 | 0 |    read from the cache, or zero
//
// The pitch is a multiple of 128 bytes: all 32 banks. Chunk c of row r lies at c ^ (r % 8), so that copies write, and
// ldmatrix reads, eight rows of one column without a bank conflict.
#pragma once

#include "attention_shape.h"
#include "primitives.cuh"

namespace pagecore {

template <int kDim>
struct TileRow {
  static constexpr int kBytes = pc_row_bytes(kDim);
  static constexpr int kChunks = kBytes / 16;
  // Lanes that share a row when it is copied, a power of two: those from kChunks on copy nothing.
  static constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;

  static_assert(kDim % 32 == 0 && kChunks <= 32, "the sums of a row are exchanged in groups of 32 dims");

  PC_MEMBER static int at(int row, int chunk) { return row * kBytes + ((chunk ^ (row & 7)) << 4); }
  // Moves an address by rows, a multiple of a power of two above the row that it is in, or by an even number of chunks.
  // Addresses of a lane differ by constants then, so that one register serves them all.
  PC_MEMBER static SharedAddress below(SharedAddress address, int rows) {
    return (address ^ ((rows & 7) << 4)) + rows * kBytes;
  }
  PC_MEMBER static SharedAddress right_of(SharedAddress address, int chunks) {
    return (address ^ ((chunks & 7) << 4)) + ((chunks & ~7) << 4);
  }
};

}  // namespace pagecore
