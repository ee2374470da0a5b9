from libc.stdint cimport int32_t

from pagecore.cache.prefix._prefix cimport PrefixCache
from pagecore.cache.state._state cimport CacheState, StoredBlocks
from pagecore.native.std cimport vector


# transfer.pxi

cdef class Transfer:
    cdef object space
    cdef list sequences
    cdef vector[vector[vector[int32_t]]] old    # of each sequence and group, states last; holes are 0
    cdef vector[vector[int32_t]] distinct       # of each group, ascending
    cdef StoredBlocks lease                     # the new blocks, in the order of `distinct`
    cdef list arriving                          # StoredBlocks of each sequence: the new blocks in the order of its row
    cdef list pairs                             # (source, target) of each group, int32 [n, 2]
    cdef vector[int32_t*] pair_data
    cdef vector[vector[int32_t]] least          # blocks that every holder of each of `distinct` publishes
    cdef vector[int32_t] published              # leading blocks that each sequence publishes

    cdef int plan(self) except -1
    cdef bint take(self) noexcept
    cdef int copy(self, planes) except -1
    # Publishes the blocks of sequences that have moved to the cache; those that several of them hold, too.
    cdef void publish(self, PrefixCache prefix) noexcept
    cdef void cover_shared(self, PrefixCache prefix, size_t index) noexcept
    cdef int32_t num_common(self, PrefixCache prefix, size_t index, size_t other) noexcept
    cdef void count_published(self, PrefixCache prefix) noexcept
    cdef void lower_limits(self, PrefixCache prefix, size_t index) noexcept
    cdef int32_t num_shared(self, PrefixCache prefix, size_t index) noexcept
    cdef size_t index_of(self, size_t group, int32_t block) noexcept


# Plans one transfer into `pools` from each of the distinct `spaces`: of the sequences or encoder outputs of which it
# holds the blocks `stored`. The three lists have an entry for each of `moving`.
cdef list plan_transfers(list moving, list spaces, list stored, tuple pools)

# The number of new blocks of each group that several transfers need.
cdef list needed_by(list transfers, size_t num_groups)


# contents.pxi

# Plans the transfer of the outputs whose last sequences on the device are among those that leave it.
cdef Transfer plan_departure(CacheState state, list sequences, space, tuple pools)
cdef void store_contents(CacheState state, Transfer transfer) noexcept

# The way back: plan_contents(), then add_content_rows(), and take_back_contents() or remove_content_rows().
cdef list plan_contents(CacheState state, list coming)
cdef int add_content_rows(CacheState state, list transfers) except -1
cdef void remove_content_rows(CacheState state, list transfers) noexcept
cdef void take_back_contents(CacheState state, list transfers) noexcept
