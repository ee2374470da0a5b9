// Units: adjacent elements that a thread moves together, in registers as in memory, and casts between types.
#pragma once

#include "cuda_src/abi/moves.h"
#include "cuda_src/device/numbers.cuh"

namespace pagecore {

template <typename A, typename B>
struct IsSame {
  static constexpr bool kValue = false;
};
template <typename A>
struct IsSame<A, A> {
  static constexpr bool kValue = true;
};

PC_DEVICE int divide(int n, const PcDivisor& by) {
  return static_cast<int>((static_cast<pc_uint64>(n) * by.multiplier) >> (31 + by.shift));
}

// `Count` elements, 1 to 32 bytes; a unit of 32 bytes is two vectors.
template <typename T, int Count>
struct Unit {
  static constexpr int kBytes = Count * static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  static_assert(kBytes <= 32 && (kBytes & (kBytes - 1)) == 0, "a unit is a power of two of bytes");
  pc_uint32 word[kWords];
};

// Loads a unit from element i on, whose address is a multiple of the unit's bytes, or of 16 for larger units. `Once`:
// no thread reads or writes these elements again during the kernel.
template <typename T, int Count, bool Once>
PC_DEVICE Unit<T, Count> load_unit(const Global<T>& source, pc_int64 i) {
  constexpr int kBytes = Unit<T, Count>::kBytes;
  Unit<T, Count> unit;
  const Global<T> from = source + i;
  if constexpr (kBytes >= 16) {
    PC_UNROLL
    for (int v = 0; v < kBytes / 16; ++v) {
      const pc_int64 at = v * 16 / static_cast<int>(sizeof(T));
      const pc_vector vector = Once ? from.load_vector_once(at) : from.load_vector(at);
      PC_UNROLL
      for (int w = 0; w < 4; ++w) unit.word[4 * v + w] = vector.word[w];
    }
  } else if constexpr (kBytes == 8) {
    const pc_uint64 both = from.template as<pc_uint64>().load(0);
    unit.word[0] = static_cast<pc_uint32>(both);
    unit.word[1] = static_cast<pc_uint32>(both >> 32);
  } else if constexpr (kBytes == 4) {
    unit.word[0] = from.template as<pc_uint32>().load(0);
  } else if constexpr (kBytes == 2) {
    unit.word[0] = from.template as<pc_uint16>().load(0);
  } else {
    unit.word[0] = from.template as<pc_uint8>().load(0);
  }
  return unit;
}

template <typename T, int Count>
PC_DEVICE void store_unit(const Global<T>& target, pc_int64 i, const Unit<T, Count>& unit) {
  constexpr int kBytes = Unit<T, Count>::kBytes;
  const Global<T> to = target + i;
  if constexpr (kBytes >= 16) {
    PC_UNROLL
    for (int v = 0; v < kBytes / 16; ++v) {
      const pc_vector vector = {{unit.word[4 * v], unit.word[4 * v + 1], unit.word[4 * v + 2], unit.word[4 * v + 3]}};
      to.store_vector(v * 16 / static_cast<int>(sizeof(T)), vector);
    }
  } else if constexpr (kBytes == 8) {
    to.template as<pc_uint64>().store(0, static_cast<pc_uint64>(unit.word[1]) << 32 | unit.word[0]);
  } else if constexpr (kBytes == 4) {
    to.template as<pc_uint32>().store(0, unit.word[0]);
  } else if constexpr (kBytes == 2) {
    to.template as<pc_uint16>().store(0, static_cast<pc_uint16>(unit.word[0]));
  } else {
    to.template as<pc_uint8>().store(0, static_cast<pc_uint8>(unit.word[0]));
  }
}

template <typename T, int Count>
PC_DEVICE float element(const Unit<T, Count>& unit, int i) {
  if constexpr (sizeof(T) == 4) {
    return pc_bits_to_float(unit.word[i]);
  } else {
    return pc_to_float(T{static_cast<pc_uint16>(unit.word[i / 2] >> (16 * (i & 1)))});
  }
}

// Rounds floats to T, to nearest even.
template <typename T, int Count>
PC_DEVICE Unit<T, Count> unit_of(const float (&values)[Count]) {
  Unit<T, Count> unit;
  if constexpr (sizeof(T) == 4) {
    PC_UNROLL
    for (int i = 0; i < Count; ++i) unit.word[i] = pc_float_to_bits(values[i]);
  } else if constexpr (Count == 1) {
    unit.word[0] = pc_from_float<T>(values[0]).bits;
  } else {
    PC_UNROLL
    for (int i = 0; i < Count; i += 2) unit.word[i / 2] = pc_pack<T>(values[i], values[i + 1]);
  }
  return unit;
}

// Copies the bits if the types are equal, else converts through float32.
template <typename T, typename S, int Count>
PC_DEVICE Unit<T, Count> cast(const Unit<S, Count>& unit) {
  if constexpr (IsSame<S, T>::kValue) {
    return unit;
  } else {
    float values[Count];
    PC_UNROLL
    for (int i = 0; i < Count; ++i) values[i] = element(unit, i);
    return unit_of<T>(values);
  }
}

// Divides each element by `divisor`; the quotient is rounded to float32 and then to T.
template <typename T, typename S, int Count>
PC_DEVICE Unit<T, Count> divide_and_cast(const Unit<S, Count>& unit, float divisor) {
  if (divisor == 1.0f) return cast<T>(unit);
  float values[Count];
  PC_UNROLL
  for (int i = 0; i < Count; ++i) values[i] = element(unit, i) / divisor;
  return unit_of<T>(values);
}

}  // namespace pagecore
