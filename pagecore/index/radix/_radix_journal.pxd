from libc.stdint cimport int64_t

from pagecore.index.radix._radix_insertion cimport RadixInsertion
from pagecore.index.radix._radix_native cimport NativeChanges


cdef class ChangeLog:
    cdef NativeChanges native
    cdef int64_t block_size
    cdef dict keys  # root of a namespace -> its key


cdef class RadixJournal(RadixInsertion):
    cdef void _forget_roots(self) except *
