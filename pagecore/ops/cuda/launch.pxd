# Declarations of launch.hpp, and the shared memory of the kernels of moves.
from libc.stdint cimport int64_t


cdef extern from "pagecore/ops/cuda/launch.hpp" namespace "pagecore::cuda" nogil:
    const int64_t kThreads

    cdef cppclass Grid:
        int64_t x
        int64_t y
        int64_t z


cdef extern from "cuda_src/abi/moves.h" nogil:
    cdef enum:
        PC_MOVE_SHARED_BYTES
