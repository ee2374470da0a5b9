# Declarations of hadamard_rows.hpp.
from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport DType


cdef extern from "pagecore/ops/hadamard_rows.hpp" namespace "pagecore" nogil:
    const int64_t kHadamardMin
    const int64_t kHadamardMax

    int64_t hadamard_block(int64_t dim) noexcept

    cdef cppclass HadamardRows:
        const char* source
        char* target
        DType type
        int64_t outer
        int64_t inner
        int64_t dim
        int64_t source_outer_stride
        int64_t source_inner_stride
        int64_t target_outer_stride
        int64_t target_inner_stride
