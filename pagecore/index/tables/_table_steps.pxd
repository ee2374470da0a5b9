from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport Integers
from pagecore.index.tables._block_tables_core cimport TablesCore
from pagecore.native.std cimport vector


cdef class TableSteps(TablesCore):
    cdef object _extend(self, object rows, object counts, object out, bint must)
    cdef list _slot_targets(self, object out, int64_t num_tokens)
    cdef bint _is_short(self, Integers rows, Integers counts) except -1
    cdef int _read_first_blocks(self, object first_blocks, vector[int32_t]& out) except -1
