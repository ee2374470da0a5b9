from libc.stdint cimport int32_t
from libcpp.vector cimport vector


cdef class StoredBlocks:
    cdef tuple pools
    cdef readonly tuple arrays              # int32 of each group; holes are 0
    cdef vector[vector[int32_t]] held       # without holes, tail first
    cdef size_t num_held                    # groups whose blocks are held

    cdef void release(self) noexcept
