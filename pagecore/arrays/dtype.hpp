// The dtype table: what pagecore stores, and how DLPack names it.
//
// This is the only place that lists dtypes; dtypes.py reads it through _shapes.pyx and adds what NumPy and the
// frameworks call each one. The order is part of the interface: a Tensor carries the index as `dtype_code`.
#pragma once

#include <array>
#include <cstdint>

#include "third_party/dlpack.h"

namespace pagecore {

enum class DType : int {
  Float32 = 0,
  Float16 = 1,
  BFloat16 = 2,
  Float8E4M3FN = 3,
  Float8E5M2 = 4,
  Int8 = 5,
  UInt8 = 6,
  Int32 = 7,
  Int64 = 8,
  Bool = 9,
};

struct DTypeRow {
  const char* name;
  uint8_t code;  // DLDataTypeCode
  uint8_t bits;
  const char* format;  // of the buffer protocol; null where it has no letter
};

inline constexpr std::array<DTypeRow, 10> kDTypes{{
    {"float32", kDLFloat, 32, "f"},
    {"float16", kDLFloat, 16, "e"},
    {"bfloat16", kDLBfloat, 16, nullptr},
    {"float8_e4m3fn", kDLFloat8_e4m3fn, 8, nullptr},
    {"float8_e5m2", kDLFloat8_e5m2, 8, nullptr},
    {"int8", kDLInt, 8, "b"},
    {"uint8", kDLUInt, 8, "B"},
    {"int32", kDLInt, 32, "i"},
    {"int64", kDLInt, 64, "l"},
    {"bool", kDLBool, 8, "?"},
}};

inline constexpr int kNumDTypes = static_cast<int>(kDTypes.size());

[[nodiscard]] constexpr int itemsize(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].bits / 8; }

// The index of a DLPack type, -1 where the table has none.
[[nodiscard]] constexpr int dtype_from_dlpack(int code, int bits) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (kDTypes[static_cast<size_t>(i)].code == code && kDTypes[static_cast<size_t>(i)].bits == bits) return i;
  }
  return -1;
}

}  // namespace pagecore
