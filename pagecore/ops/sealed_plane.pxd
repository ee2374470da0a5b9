# Declarations of sealed_plane.hpp.
from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport DType
from pagecore.ops.args cimport Cache, Indices, Table


cdef extern from "pagecore/ops/sealed_plane.hpp" namespace "pagecore" nogil:
    cdef cppclass SealedPlane:
        char* words
        char* scales
        DType scale_type
        int64_t bits
        int64_t group
        int64_t block_stride
        int64_t head_stride
        int64_t row_stride
        int64_t scales_block_stride
        int64_t scales_head_stride
        int64_t scales_row_stride
        int64_t group_stride
        int64_t least_stride

    cdef cppclass SealedBlocks:
        SealedPlane key
        SealedPlane value
        int64_t num_blocks
        Table table
        Indices lens

    cdef cppclass SealArgs:
        Cache key
        Cache value
        SealedPlane sealed_key
        SealedPlane sealed_value
        int64_t num_sealed
        Indices sources
        Indices targets
        int64_t lowest
