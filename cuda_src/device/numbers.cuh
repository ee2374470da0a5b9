// Integer helpers, elements of index arrays, and constants of base-2 logarithms.
#pragma once

#include "cuda_src/device/primitives.cuh"

namespace pagecore {

// The hardware computes powers and logarithms to base 2.
constexpr float kLog2OfE = 1.44269504f;
constexpr float kLogOf2 = 0.693147181f;

PC_DEVICE int min_of(int a, int b) { return a < b ? a : b; }
PC_DEVICE int max_of(int a, int b) { return a > b ? a : b; }
PC_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
// Returns `low` if low > high.
PC_DEVICE int clamp(pc_int64 x, int low, int high) {
  return x < low || high < low ? low : x > high ? high : static_cast<int>(x);
}

// An element of int32 or int64 whose load is in flight; the thread waits for it in get().
struct PendingIndex {
  pc_uint32 low;
  pc_uint32 high;  // of int64

  PC_MEMBER pc_int64 get(bool wide) const {
    if (!wide) return static_cast<pc_int32>(low);
    return static_cast<pc_int64>(static_cast<pc_uint64>(high) << 32 | low);
  }
};

PC_DEVICE PendingIndex begin_index(const PcIndices& array, pc_int64 i) {
  const pc_int64 at = i * array.stride;
  if (!array.wide) return {Global<pc_uint32>(array.data).load(at), 0};
  const pc_uint64 both = Global<pc_uint64>(array.data).load(at);
  return {static_cast<pc_uint32>(both), static_cast<pc_uint32>(both >> 32)};
}

// Loads an int64 as two words. The attention kernels use this form: with 64-bit loads, prefill of head dim 128 spills.
PC_DEVICE PendingIndex begin_index_words(pc_address data, pc_int64 at, bool wide) {
  const Global<pc_uint32> words(data);
  PendingIndex index = {0, 0};
  if (wide) index.high = words.load(2 * at + 1);
  index.low = words.load(wide ? 2 * at : at);
  return index;
}

PC_DEVICE PendingIndex begin_index_words(const PcIndices& array, int i) {
  return begin_index_words(array.data, i * array.stride, array.wide != 0);
}

PC_DEVICE pc_int64 load_index(const PcIndices& array, pc_int64 i) { return begin_index(array, i).get(array.wide != 0); }

}  // namespace pagecore
