// The place of a slot in a cache, for the kernels that write.
#pragma once

#include "cuda_src/device/units.cuh"

namespace pagecore {

struct SlotPosition {
  pc_int64 block;
  pc_int64 offset;  // token in the block
};

// `shift`: the block size is 1 << shift, or shift is -1.
PC_DEVICE SlotPosition position_of(pc_int64 slot, const PcDivisor& block_size, int shift) {
  const int size = block_size.divisor;
  pc_int64 block = 0;
  if (shift >= 0) {
    block = slot >> shift;
  } else if (slot < (pc_int64{1} << 31)) {
    block = divide(static_cast<int>(slot), block_size);
  } else {
    block = slot / size;
  }
  return {block, slot - block * size};
}

}  // namespace pagecore
