# Declarations of radix/journal.hpp, and changes of a tree as Python objects.
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from pagecore.index.radix._radix_query cimport Digest, Mark, Marks


cdef extern from "pagecore/index/radix/journal.hpp" namespace "pagecore::radix" nogil:
    cdef cppclass ChangeRecord:
        cbool is_stored
        int32_t component
        int32_t first
        int32_t count
        int32_t num_marks
        uint64_t root
        uint64_t parent

    cdef cppclass NativeChanges "pagecore::radix::Changes":
        vector[ChangeRecord] records
        vector[uint64_t] hashes
        vector[int32_t] tokens
        vector[Mark] marks
        cbool has_overflowed

    uint64_t hash_block(uint64_t parent, const int32_t* tokens, int64_t block_size, Marks marks, int64_t block)
    uint64_t hash_bytes(const char* bytes, size_t size, uint64_t seed)


cdef class ChangeLog:
    cdef NativeChanges native
    cdef int64_t block_size
    cdef dict keys  # root of a namespace -> its key


# Root of the hashes of a namespace, given its key.
cdef uint64_t root_of(object key) except? 0
