// Copies of blocks between arrays, and of tokens between paged caches and packed sequences, as bytes or with a cast.
//
//   shape    axis 0 | axis 1 | ... | units      a block, or some of its tokens; the host merges axes that are
//                                               contiguous on both sides, and cuts the last axis into units
//   unit     16 bytes of each side (32 of float32 if the other side has 16 bits), or less if an address or a stride
//            requires it
//
// The units of a block are numbered. A block of threads has a range of units, and a thread every num_threads-th of
// them, so that the threads of a warp access adjacent units if the last axis is long enough. In flight: a thread loads
// up to 64 bytes before it stores any. Every element is read once and written once. Shared memory holds only the sum of
// lengths.
#include "cuda_src/abi/moves.h"
#include "cuda_src/device/block_sums.cuh"
#include "cuda_src/device/primitives.cuh"
#include "cuda_src/device/units.cuh"
#include "cuda_src/device/write_slots.cuh"

namespace pagecore {

// Addresses of a block, or of its first token, in the two arrays.
struct MovePointers {
  Global<pc_uint8> source;
  Global<pc_uint8> target;
};

// Byte offsets of a unit from these addresses.
struct MoveOffsets {
  pc_int64 source;
  pc_int64 target;
};

PC_DEVICE MoveOffsets offsets_of(const PcMoveShape& shape, int number) {
  MoveOffsets offsets = {0, 0};
  PC_NO_UNROLL
  for (int i = shape.num_axes - 1; i > 0; --i) {
    const PcMoveAxis& axis = shape.axes[i];
    const int outer = divide(number, axis.size), along = number - outer * axis.size.divisor;
    offsets.source += along * axis.source_stride;
    offsets.target += along * axis.target_stride;
    number = outer;
  }
  offsets.source += number * shape.axes[0].source_stride;
  offsets.target += number * shape.axes[0].target_stride;
  return offsets;
}

// Moves the units first, first + step ... below end; stores zeros if `zeros`.
template <typename S, typename T, int Count>
PC_DEVICE void move_units(const PcMoveShape& shape, const MovePointers& base, bool zeros, int first, int step,
                          int end) {
  constexpr int kInFlight = sizeof(S) == 4 ? 2 : 4;
  PC_NO_UNROLL
  for (int number = first; number < end; number += kInFlight * step) {
    Unit<S, Count> units[kInFlight];
    pc_int64 targets[kInFlight];
    PC_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (number + i * step >= end) break;
      const MoveOffsets offsets = offsets_of(shape, number + i * step);
      targets[i] = offsets.target;
      units[i] = {};
      if (!zeros) units[i] = load_unit<S, Count, false>((base.source + offsets.source).template as<S>(), 0);
    }
    PC_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (number + i * step >= end) break;
      store_unit((base.target + targets[i]).template as<T>(), 0, cast<T>(units[i]));
    }
  }
}

// Dispatches on the unit of the shape. For copies of bytes both S and T are pc_uint8.
template <typename S, typename T>
PC_DEVICE void move(const PcMoveShape& shape, const MovePointers& base, bool zeros, int first, int step, int end) {
  if constexpr (sizeof(S) == 1) {
    if (shape.unit == 16) return move_units<S, T, 16>(shape, base, zeros, first, step, end);
  }
  if (shape.unit == 8) return move_units<S, T, 8>(shape, base, zeros, first, step, end);
  if (shape.unit == 4) return move_units<S, T, 4>(shape, base, zeros, first, step, end);
  if (shape.unit == 2) return move_units<S, T, 2>(shape, base, zeros, first, step, end);
  move_units<S, T, 1>(shape, base, zeros, first, step, end);
}

struct Pair {
  pc_int64 source;
  pc_int64 target;
};

PC_DEVICE Pair pair_at(const PcPairParams& params, int i) {
  if (params.on_device == 0) return {params.pairs[i][0], params.pairs[i][1]};
  const PcIndices sources = {params.on_device, params.pair_stride, params.num_pairs, params.wide};
  const pc_address column = static_cast<pc_address>(params.column_stride * (params.wide ? 8 : 4));
  const PcIndices targets = {params.on_device + column, params.pair_stride, params.num_pairs, params.wide};
  return {load_index(sources, i), load_index(targets, i)};
}

// Grid: ranges of a block's units; pairs, in steps of the axis; arrays. For ordered pairs the axis of pairs is 1: each
// thread moves its units of all pairs in order, and reads only elements that it has written itself.
template <typename S, typename T>
PC_KERNEL(128, 6)
void move_pairs(const PcPairParams params) {
  const int array = pc_block_z(), step = pc_num_threads();
  const int first = pc_block_x() * step * params.units_per_thread + pc_thread();
  const int given = first + step * params.units_per_thread;
  const int end = given < params.shape.num_units ? given : params.shape.num_units;
  for (pc_int64 i = pc_block_y(); i < params.num_pairs; i += pc_num_blocks_y()) {
    const Pair pair = pair_at(params, static_cast<int>(i));
    if (params.one_cache && pair.source == pair.target) continue;
    if (pair.source < params.lowest || pair.source >= params.num_source_blocks) continue;
    if (pair.target < params.lowest || pair.target >= params.num_target_blocks) continue;
    const MovePointers base = {Global<pc_uint8>(params.sources[array]) + pair.source * params.source_block_stride,
                               Global<pc_uint8>(params.targets[array]) + pair.target * params.target_block_stride};
    move<S, T>(params.shape, base, false, first, step, end);
  }
}

// In place of a byte offset, which is negative if strides are.
constexpr pc_int64 kNoSlot = -0x7fffffffffffffff - 1;

// The byte offset of a slot, or kNoSlot if there is no such slot.
PC_DEVICE pc_int64 byte_of_slot(const PcSlotParams& params, const PcIndices& slots, int i) {
  const pc_int64 slot = load_index(slots, i);
  if (static_cast<pc_uint64>(slot) >= static_cast<pc_uint64>(params.num_slots)) return kNoSlot;
  const SlotPosition at = position_of(slot, params.block_size, params.block_shift);
  return at.block * params.block_stride + at.offset * params.token_stride;
}

// Moves one unit of all tokens. Sources are loaded ahead of the stores before them: no store changes a later source.
template <int Count>
PC_DEVICE void move_unit_of_slots(const PcSlotParams& params, const Global<pc_uint8>& array, int number) {
  constexpr int kInFlight = 8;
  const Global<pc_uint8> unit = array + offsets_of(params.shape, number).source;
  PC_NO_UNROLL
  for (int first = 0; first < params.sources.size; first += kInFlight) {
    Unit<pc_uint8, Count> units[kInFlight];
    PC_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      units[k] = {};
      if (first + k >= params.sources.size) break;
      const pc_int64 source = byte_of_slot(params, params.sources, first + k);
      if (source != kNoSlot) units[k] = load_unit<pc_uint8, Count, false>(unit, source);
    }
    PC_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k >= params.sources.size) break;
      const pc_int64 source = byte_of_slot(params, params.sources, first + k);
      const pc_int64 target = byte_of_slot(params, params.targets, first + k);
      if (source != kNoSlot && target != kNoSlot) store_unit(unit, target, units[k]);
    }
  }
}

// Grid: units of a token; 1; arrays. A thread moves its unit of all tokens in order, so that nothing that another
// thread writes is read.
PC_KERNEL(128, 6) void move_slots(const PcSlotParams params) {
  const int number = pc_block_x() * pc_num_threads() + pc_thread();
  if (number >= params.shape.num_units) return;
  const Global<pc_uint8> array(params.arrays[pc_block_z()]);
  if (params.shape.unit == 16) return move_unit_of_slots<16>(params, array, number);
  if (params.shape.unit == 8) return move_unit_of_slots<8>(params, array, number);
  if (params.shape.unit == 4) return move_unit_of_slots<4>(params, array, number);
  if (params.shape.unit == 2) return move_unit_of_slots<2>(params, array, number);
  move_unit_of_slots<1>(params, array, number);
}

// Returns the length of a sequence, clamped to the capacity of its row of the table.
PC_DEVICE pc_int64 length_of(const PcSequenceParams& params, int sequence) {
  const pc_int64 length = load_index(params.seq_lens, sequence);
  const pc_int64 room = static_cast<pc_int64>(params.table.width) * params.block_size;
  return length < 0 ? 0 : length < room ? length : room;
}

// Returns block `at` of a sequence; -1 for a hole. Invalid rows and blocks are holes.
PC_DEVICE pc_int64 block_at(const PcSequenceParams& params, int sequence, pc_int64 at) {
  const pc_int64 row = params.rows.data != 0 ? load_index(params.rows, sequence) : sequence;
  if (row < 0 || row >= params.table.num_rows) return -1;
  const pc_int64 i = row * params.table.row_stride + at;
  const pc_int64 block =
      params.table.wide ? Global<pc_int64>(params.table.data).load(i) : Global<int>(params.table.data).load(i);
  return block < params.lowest || block >= params.num_blocks ? -1 : block;
}

// Grid: sequences; their blocks, in steps of the axis; arrays. The start of a sequence in the packed arrays is the sum
// of the lengths before it, which each block of threads computes for itself.
template <typename S, typename T>
PC_KERNEL(128, 4)
void move_sequences(const PcSequenceParams params) {
  const int sequence = pc_block_x(), array = pc_block_z();
  pc_int64 begin = 0;
  for (int i = pc_thread(); i < sequence; i += pc_num_threads()) begin += length_of(params, i);
  begin = sum_over_block<PC_MOVE_THREADS>(begin);
  const pc_int64 length = length_of(params, sequence), room = params.num_tokens - begin;
  const pc_int64 num_tokens = length < room ? length : room;
  const Global<pc_uint8> cache(params.caches[array]), packed(params.packed[array]);
  for (pc_int64 at = pc_block_y(); at * params.block_size < num_tokens; at += pc_num_blocks_y()) {
    const pc_int64 done = at * params.block_size, left = num_tokens - done;
    const int tokens = left < params.block_size ? static_cast<int>(left) : params.block_size;
    const pc_int64 block = block_at(params, sequence, at);
    const bool hole = block < 0;
    if (hole && !params.gathers) continue;
    const Global<pc_uint8> paged = cache + (hole ? 0 : block * params.block_stride);
    const Global<pc_uint8> row = packed + (begin + done) * params.token_stride;
    const MovePointers base = params.gathers ? MovePointers{paged, row} : MovePointers{row, paged};
    move<S, T>(params.shape, base, hole, pc_thread(), pc_num_threads(), tokens * params.shape.units_per_token);
  }
}

}  // namespace pagecore
