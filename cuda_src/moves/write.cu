// Slot-mapped write: rows of new tokens into the slots of a cache, with a cast.
//
//   token of one plane   | head 0 | head 1 | ...
//   rows of a token      1 if all heads are contiguous in the input and in the cache, else one for each head
//   unit                 16 bytes: 8 elements of 16 bits, or 4 of float32; 32 bytes of float32 if the other side has
//                        16 bits; less if an address, a stride or the row's length requires it
//
// The units of all tokens of a plane are numbered, token by token. A block of threads has a range of units, and a
// thread every num_threads-th of them, so that the threads of a warp access adjacent units. In flight: a thread loads
// up to four units and their slots before it stores any. Planes are the y axis of the grid. Every new element is read
// once and written once; a slot is read once for each unit of its token.
#include "cuda_src/abi/moves.h"
#include "cuda_src/device/primitives.cuh"
#include "cuda_src/device/units.cuh"
#include "cuda_src/device/write_slots.cuh"

namespace pagecore {

// Returns the elements from the start of the cache to a slot.
PC_DEVICE pc_int64 slot_offset(const PcWriteParams& params, const PcCache& cache, pc_int64 slot) {
  const SlotPosition at = position_of(slot, params.block_size, params.block_shift);
  return at.block * cache.block_stride + at.offset * cache.token_stride;
}

// The position of unit `number` of a plane; `count`: elements of a unit.
struct UnitPosition {
  PC_MEMBER UnitPosition(const PcWritePlane& plane, int number, int count) {
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
      const UnitPosition unit(plane, number + i * step, Count);
      const pc_int64 at = unit.token * plane.rows.token_stride + unit.row * plane.rows.head_stride + unit.at;
      slots[i] = begin_index(params.slots, unit.token);
      units[i] = load_unit<T, Count, true>(rows, at);
      divisors[i] = plane.scales != 0 ? Global<float>(plane.scales).load(unit.row * plane.scale_stride) : plane.scale;
    }
    PC_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (number + i * step >= end) break;
      const pc_int64 slot = slots[i].get(params.slots.wide != 0);
      // As an unsigned number a negative slot is past the end.
      if (static_cast<pc_uint64>(slot) >= static_cast<pc_uint64>(params.num_slots)) continue;
      const UnitPosition unit(plane, number + i * step, Count);
      const pc_int64 at = slot_offset(params, plane.cache, slot) + unit.row * plane.cache.head_stride + unit.at;
      store_unit(cache, at, divide_and_cast<C>(units[i], divisors[i]));
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
