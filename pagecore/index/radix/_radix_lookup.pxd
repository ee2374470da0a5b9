from libc.stdint cimport int32_t, int64_t

from pagecore.index.radix._radix_core cimport RadixCore, Receipt
from pagecore.index.radix._radix_native cimport NativeMatch
from pagecore.index.radix._radix_query cimport Prefix
from pagecore.index.radix._radix_values cimport Match


cdef class RadixLookup(RadixCore):
    # Pins a match in every component, and counts the hit.
    cdef int lock(self, NativeMatch& found, Receipt receipt, double now) except -1

    cdef list _read_prefixes(self, object prefixes, object namespaces, object spans, object max_tokens)
    cdef Match _new_match(self)
    cdef Receipt _new_receipt(self, Prefix prefix)
    cdef int _find(self, Prefix prefix, NativeMatch* found) except -1
    cdef int _fill(self, Match match, const NativeMatch& found) except -1
    cdef object _copy_blocks(self, object lanes, int32_t node, int32_t offset, int64_t count)
    cdef Match _match(self, Prefix prefix)
