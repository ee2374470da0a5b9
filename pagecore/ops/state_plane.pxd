# Declarations of state_plane.hpp.
from libc.stdint cimport int8_t, int64_t

from pagecore.arrays.dtypes.codes cimport DType


cdef extern from "pagecore/ops/state_plane.hpp" namespace "pagecore" nogil:
    cdef cppclass StatePlane:
        char* state
        int8_t* codes
        char* scales
        DType type
        int64_t num_matrices
        int64_t num_values
        int64_t num_keys
        int64_t state_stride
        int64_t codes_stride
        int64_t scales_stride
