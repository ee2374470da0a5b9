# The dtype table, and the numbers that a Tensor carries: dtype codes by the table, device types by DLPack.
from libc.stdint cimport uint8_t


cdef extern from "pagecore/arrays/dtypes/dtype.hpp" nogil:
    enum class DType "pagecore::DType":
        pass

    enum:
        FLOAT32 "static_cast<int>(pagecore::DType::F32)"
        # Kernels compute with float32, float16 and bfloat16.
        LAST_FLOAT "static_cast<int>(pagecore::DType::BF16)"
        FLOAT8_E4M3FN "static_cast<int>(pagecore::DType::F8E4M3FN)"
        FLOAT8_E5M2 "static_cast<int>(pagecore::DType::F8E5M2)"
        INT8 "static_cast<int>(pagecore::DType::I8)"
        UINT8 "static_cast<int>(pagecore::DType::U8)"
        INT32 "static_cast<int>(pagecore::DType::I32)"
        INT64 "static_cast<int>(pagecore::DType::I64)"
        BOOL "static_cast<int>(pagecore::DType::Bool)"

        CPU "static_cast<int>(kDLCPU)"
        CUDA "static_cast<int>(kDLCUDA)"


cdef extern from "pagecore/arrays/dtypes/dtype.hpp" namespace "pagecore" nogil:
    cdef struct DTypeRow:
        const char* name
        uint8_t code
        uint8_t bits
        const char* format

    const DTypeRow* kDTypes
    const int kNumDTypes
    int dtype_from_dlpack(int code, int bits)
