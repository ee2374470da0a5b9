from libc.stdint cimport int32_t
from libcpp.vector cimport vector

from pagecore.index._radix_query cimport Mark, RetentionHint
from pagecore.index._radix_tree cimport RadixTree, Receipt


cdef class PrefixHold:
    cdef Receipt receipt
    cdef vector[Mark] marks     # of the spans, as far as a row reaches
    cdef bint offers_whole      # published from the start each time: it has spans, or a value that the tree keeps
    cdef double priority        # NaN for none
    cdef double time_to_live    # infinite for none
    cdef double rank            # NaN for none
    cdef int32_t space          # of the namespace; good while the receipt holds something, or within one call

    # A hold with the same options on nothing yet.
    cdef PrefixHold blank_copy(self)
    cdef RetentionHint hint(self, double now) noexcept
