from libc.stdint cimport int32_t, int64_t

from pagecore.index.radix._radix_query cimport HintRanges, Query, RetentionHint
from pagecore.index.radix._radix_tree cimport RadixTree, Receipt
from pagecore.native.std cimport vector
from pagecore.tiers.host.operations._index cimport HostIndex


cdef class Path:
    cdef RadixTree tree
    cdef Receipt receipt
    cdef int64_t num_blocks
    cdef vector[vector[int32_t]] ids    # of each lane of the tree; 0 where a window has none

    # Pins the blocks that the full component has of a query, up to `limit`, and what windows have before their end.
    cdef int pin(self, RadixTree tree, object key, const Query& query, int64_t limit) except -1
    # Reads the ids; the tree may replace those of pinned blocks, too.
    cdef int read(self) except -1
    cdef void release(self) noexcept


# Offers entries of a prefix to the host's tree, which takes those that it lacks; returns the number of leading blocks
# that the tree has then. `lanes` has the host block at each index of the prefix, 0 for none; the ids that the tree has
# are filled in. A state of `state_blocks` blocks is offered if that is above 0.
cdef int64_t publish(
    HostIndex host, object key, Query query, vector[vector[int32_t]]& lanes, int64_t num_blocks, int64_t state_blocks,
    int32_t state_slot, const RetentionHint& hint, HintRanges ranges, double now
) except -1
