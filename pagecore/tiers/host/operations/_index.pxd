from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._cache cimport PrefixCache
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._radix_query cimport Query
from pagecore.index.radix._radix_tree cimport RadixTree
from pagecore.native.std cimport vector


cdef class HostIndex:
    cdef readonly RadixTree tree
    cdef readonly tuple pools           # BlockPool of each group, then that of the state slots
    cdef readonly PrefixCache prefix    # of the device
    cdef vector[int32_t] groups         # of each lane of the tree: those without a window come first
    cdef vector[int32_t] components     # of each group
    cdef int32_t num_full               # lanes without a window
    cdef int32_t num_lanes
    cdef bint has_states
    cdef bint uses_hints                # the policy orders by values that sequences carry
    cdef public bint is_exclusive       # what the device has as well is evicted first
    cdef public double min_priority     # what has a smaller one leaves the device without a copy
    cdef readonly int64_t block_size
    cdef public object tail             # SpilledTail of a path that is still on the device; None for none
    cdef readonly object leases         # WeakSet of the Leases that hold blocks
    cdef readonly list lost             # receipts of holds that were collected without a release
    cdef readonly int64_t num_evicted_blocks
    cdef readonly int64_t num_evicted_states

    # The pool of a group, or of the states for num_lanes.
    cdef BlockPool pool(self, size_t group)
    # First call of every operation: releases lost receipts, and forgets empty namespaces.
    cdef int sweep(self) except -1
    # Returns True if eviction can make `needed` blocks of each group free, states last.
    cdef bint can_make_room(self, const vector[int64_t]& needed) noexcept
    # Evicts until the pools have `needed` free blocks of each group, states last; returns False if they do not.
    cdef bint make_room(self, const vector[int64_t]& needed) noexcept
    cdef int64_t evict(self, int32_t component, int64_t amount) noexcept
    cdef void free_gone(self, const vector[vector[int32_t]]& gone) noexcept


# Number of a namespace in a tree; -1 if the tree does not have it. `key` is the result of key_of; None: 0.
cdef int32_t space_of(RadixTree tree, object key) except -2
