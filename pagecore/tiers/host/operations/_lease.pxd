from libc.stdint cimport int32_t, int64_t

from pagecore.cache.state._stored cimport StoredBlocks
from pagecore.index.radix._radix_query cimport Mark, Query
from pagecore.index.radix._radix_tree cimport Receipt
from pagecore.native.std cimport vector
from pagecore.tiers.host.operations._index cimport HostIndex


cdef class EntryLease:
    cdef object __weakref__
    cdef readonly HostIndex index
    cdef StoredBlocks stored    # of each group, states last

    cdef void give_up(self) noexcept


cdef class EntryHold(EntryLease):
    cdef Receipt receipt
    cdef double rank            # of the prefix after the release; NaN leaves it
    cdef readonly int64_t num_tokens
    cdef readonly int64_t state_tokens  # tokens before the state that it holds; 0 for none


# Tokens, spans and namespace of a prefix, which the object owns.
cdef class PrefixKey:
    cdef object ids
    cdef object key             # of the namespace
    cdef vector[Mark] marks
    cdef int64_t num_blocks

    cdef Query query(self, int64_t num_blocks) noexcept


cdef PrefixKey prefix_key(int64_t block_size, const int32_t[::1] ids, object options)
# Spans of a prefix as a tuple of (start, end, digest); None if it has none.
cdef object spans_of(PrefixKey prefix, int64_t block_size)
# A lease of `counts` blocks of each group, states last; None if they are short. The caller has made room.
cdef EntryLease take_lease(HostIndex index, const vector[int64_t]& counts)
