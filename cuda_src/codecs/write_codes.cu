// Slot-mapped write into a quantised cache: scales and codes of new rows.
//
//   row      one head of one token; a group of 2 to 32 lanes of a warp processes it, numbered across tokens and heads
//   chunk    8 elements of a row: 16 bytes of 16-bit elements or 32 of float32, and 8 or 4 bytes of codes
//
//              chunks of a row
//            | 0 | 1 | 2 | 3 | ...       lane l of the row has chunks l, l + lanes, ...
//            | group |                   16 numbers share a scale: 2 adjacent lanes; 32 numbers: 4 lanes
//
// Formats with a scale for the row read the row twice, once for the scale, and the second time from the cache of the
// multiprocessor. Every other format reads it once. Planes are the y axis of the grid. Rows without a slot are read but
// not written, because all lanes take part in the exchange of the largest numbers.
#include "cuda_src/codecs/code_writers.cuh"

namespace pagecore {

template <typename T>
PC_KERNEL(128, 4)
void write_codes(const PcCodeParams params) {
  const PcCodePlane& plane = params.planes[pc_block_y()];
  write_row(load_code_row<T>(params, plane), plane.stored.format, plane.is_4over6 != 0);
}

}  // namespace pagecore
