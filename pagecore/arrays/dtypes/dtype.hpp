// The dtype table: the dtypes that pagecore stores, with their names and DLPack codes.
//
// No other file lists dtypes. dtypes.py reads the table through _shapes.pyx and adds the names that NumPy and the
// frameworks use; codes.pxd declares the codes for Cython; kernels on the host and on CUDA use the same numbers. The
// order is part of the interface: a Tensor carries the index as `dtype_code`.
#pragma once

#include <array>
#include <cstdint>

#include "third_party/dlpack.h"

namespace pagecore {

enum class DType : int32_t {
  F32 = 0,
  F16 = 1,
  BF16 = 2,
  F8E4M3FN = 3,
  F8E5M2 = 4,
  I8 = 5,
  U8 = 6,
  I32 = 7,
  I64 = 8,
  Bool = 9,
};

struct DTypeRow {
  const char* name;
  uint8_t code;  // DLDataTypeCode
  uint8_t bits;
  const char* format;  // letter of the buffer protocol; null if it has none
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

// Return the index of a DLPack type, or -1 if the table lacks it.
[[nodiscard]] constexpr int dtype_from_dlpack(int code, int bits) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (kDTypes[static_cast<size_t>(i)].code == code && kDTypes[static_cast<size_t>(i)].bits == bits) return i;
  }
  return -1;
}

}  // namespace pagecore
