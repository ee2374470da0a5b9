from libc.stdint cimport int32_t
from libcpp.vector cimport vector

from pagecore.cache.swap._stored cimport StoredBlocks


cdef class Transfer:
    cdef object space
    cdef list sequences
    cdef vector[vector[vector[int32_t]]] old    # of each sequence and group, states last; holes are 0
    cdef vector[vector[int32_t]] distinct       # of each group, ascending
    cdef StoredBlocks lease                     # the new blocks, in the order of `distinct`
    cdef list arriving                          # StoredBlocks of each sequence: the new blocks in the order of its row
    cdef list pairs                             # (source, target) of each group, int32 [n, 2]
    cdef vector[int32_t*] pair_data

    cdef int plan(self) except -1
    cdef bint take(self) noexcept
    cdef int copy(self, planes) except -1
    cdef size_t index_of(self, size_t group, int32_t block) noexcept
