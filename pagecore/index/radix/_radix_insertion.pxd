from libc.stdint cimport int32_t

from pagecore.index.radix._radix_core cimport Receipt
from pagecore.index.radix._radix_lookup cimport RadixLookup
from pagecore.index.radix._radix_native cimport NativeInserted
from pagecore.index.radix._radix_query cimport Insertion
from pagecore.index.radix._radix_values cimport Inserted


cdef class RadixInsertion(RadixLookup):
    cdef Insertion _insertion(
        self, object time, object tokens, object blocks, object states, object namespace, object spans, object receipt,
        object priority, object time_to_live, object rank
    )
    cdef Insertion _entry(self, object time, object entry)
    cdef int _check_moved(self, Insertion insertion) except -1
    cdef int32_t _add_space(self, Insertion insertion) except -1
    cdef int _insert(self, Insertion insertion, Inserted inserted) except -1
    cdef int _extend(self, Insertion insertion, Receipt receipt, Inserted inserted) except -1
    cdef void _hand_over(self, NativeInserted& done, Inserted inserted) noexcept
