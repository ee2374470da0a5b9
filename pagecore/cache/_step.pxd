from libc.stdint cimport int32_t, int64_t

from pagecore.index._block_tables cimport BlockTables, StepBuffers


cdef class Step:
    cdef readonly StepBuffers buffers
    cdef readonly bint in_flight   # prepared, and neither committed nor abandoned yet
    cdef public object staged      # the StagedBatch of a batch on a device; None on the host
    cdef list sequences            # of the last load, in order
    cdef object owner
    cdef int32_t count
    cdef object rows_array         # scratch of max_sequences entries each, so that a step allocates nothing
    cdef object counts_array
    cdef object lengths_array
    cdef int32_t* rows
    cdef int32_t* counts
    cdef int32_t* lengths

    cdef int _take_counts(self, object counts) except -1
    cdef int _check_size(self, Py_ssize_t size) except -1
    cdef int32_t _checked(self, int64_t count) except -1
    cdef int32_t _settle(self, object verdict)
    cdef list _fuller(self, int32_t block_size)
