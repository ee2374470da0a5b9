// Slot-mapped write: rows of new tokens into the slots of a cache, converted on the way.
//
//   a token's row of one plane   | head 0 | head 1 | ...     as the new rows have it, and as the cache does
//   rows a token                 1 where all heads follow one another on both sides, else one a head
//   units                        8 elements of 16 bits, or 4 of float32: 16 bytes a side, 32 of float32 beside 16 bits;
//                                fewer where an address, a stride or the row's length allows no more
//
// The units of all tokens of a plane are numbered, token after token, and dealt out: a block of threads has a stretch
// of them, a thread every num_threads-th of that, so that a warp reads and writes neighbours. A thread asks for up to
// four units and their slots before it writes any. Planes are the y axis of the grid. Every new element is read once
// and written once; a slot is read by each unit of its token.
#include "abi_moves.h"
#include "primitives.cuh"
#include "units.cuh"

namespace pagecore {

// Where a slot lies, in elements from the start of the cache.
PC_DEVICE pc_int64 place_of_slot(const PcWriteParams& params, const PcCache& cache, pc_int64 slot) {
  const int size = params.block_size.divisor;
  pc_int64 block = 0;
  if (params.block_shift >= 0) {
    block = slot >> params.block_shift;
  } else if (slot < (pc_int64{1} << 31)) {
    block = divide(static_cast<int>(slot), params.block_size);
  } else {
    block = slot / size;
  }
  return block * cache.block_stride + (slot - block * size) * cache.token_stride;
}

// Which unit of a plane a number stands for.
struct UnitPlace {
  PC_MEMBER UnitPlace(const PcWritePlane& plane, int number, int count) {
    token = divide(number, plane.units_per_token);
    const int of_token = number - token * plane.units_per_token.divisor;
    row = divide(of_token, plane.units_per_row);
    at = (of_token - row * plane.units_per_row.divisor) * count;
  }

  int token;
  int row;
  int at;  // the first element in the row
};

template <typename T, typename C, int Count>
PC_DEVICE void write_units(const PcWriteParams& params, const PcWritePlane& plane) {
  constexpr int kInFlight = Unit<T, Count>::kBytes > 16 ? 2 : 4;
  const Global<T> rows(plane.rows.data);
  const Global<C> cache(plane.cache.data);
  const int step = pc_num_threads(), first = pc_block_x() * step * params.units_per_thread + pc_thread();
  const int given = first + step * params.units_per_thread, end = given < plane.num_units ? given : plane.num_units;
  PC_NO_UNROLL
  for (int number = first; number < end; number += kInFlight * step) {
    Unit<T, Count> units[kInFlight];
    PendingIndex slots[kInFlight];
    float divisors[kInFlight];
    PC_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (number + i * step >= end) break;
      const UnitPlace place(plane, number + i * step, Count);
      const pc_int64 at = place.token * plane.rows.token_stride + place.row * plane.rows.head_stride + place.at;
      slots[i] = begin_index(params.slots, place.token);
      units[i] = load_unit<T, Count, true>(rows, at);
      divisors[i] = plane.scales != 0 ? Global<float>(plane.scales).load(place.row) : plane.scale;
    }
    PC_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (number + i * step >= end) break;
      const pc_int64 slot = slots[i].get(params.slots.wide != 0);
      // A negative slot is past the end as an unsigned number.
      if (static_cast<pc_uint64>(slot) >= static_cast<pc_uint64>(params.num_slots)) continue;
      const UnitPlace place(plane, number + i * step, Count);
      const pc_int64 at = place_of_slot(params, plane.cache, slot) + place.row * plane.cache.head_stride + place.at;
      store_unit(cache, at, divided<C>(units[i], divisors[i]));
    }
  }
}

template <typename T, typename C>
PC_KERNEL(128, 8)
void write_kv(const PcWriteParams params) {
  const PcWritePlane& plane = params.planes[pc_block_y()];
  if constexpr (sizeof(T) + sizeof(C) < 8) {
    if (plane.unit == 8) return write_units<T, C, 8>(params, plane);
  }
  if (plane.unit == 4) return write_units<T, C, 4>(params, plane);
  if (plane.unit == 2) return write_units<T, C, 2>(params, plane);
  write_units<T, C, 1>(params, plane);
}

}  // namespace pagecore
