# Declarations of affine_codes.hpp.
from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport DType


cdef extern from "pagecore/ops/affine_codes.hpp" namespace "pagecore" nogil:
    cdef cppclass AffineCodes:
        char* numbers
        char* words
        char* scales
        DType type
        DType scale_type
        int64_t bits
        int64_t num_matrices
        int64_t num_entries
        int64_t num_lanes
        int64_t group
        int64_t numbers_matrix_stride
        int64_t entry_stride
        int64_t lane_stride
        int64_t words_matrix_stride
        int64_t word_stride
        int64_t word_lane_stride
        int64_t scales_matrix_stride
        int64_t group_stride
        int64_t scale_lane_stride
        int64_t least_offset
