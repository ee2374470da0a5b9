from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._cache cimport PrefixCache
from pagecore.cache.state._state cimport CacheState
from pagecore.cache.state._stored cimport StoredBlocks
from pagecore.index.radix._radix_tree cimport NativeMatch, Receipt
from pagecore.native.std cimport vector
from pagecore.tiers.host.operations._index cimport HostIndex
from pagecore.tiers.host.operations._lease cimport EntryHold, PrefixKey
from pagecore.tiers.host.operations._path cimport Path


cdef class Promotion:
    cdef CacheState state
    cdef HostIndex host
    cdef PrefixCache prefix
    cdef PrefixKey key
    cdef Path device
    cdef StoredBlocks lease
    cdef vector[vector[int32_t]] places     # of each lane: the indices of the blocks that the device lacks
    cdef int32_t state_slot                 # of the host
    cdef int64_t tenant
    cdef readonly EntryHold hold
    cdef readonly int64_t num_blocks
    cdef readonly list pairs

    # Pins the longest reusable prefix of the host, up to `limit` blocks; returns the blocks that it has, or 0 if they
    # are less than `min_blocks` more than those of the device.
    cdef int64_t choose(self, int64_t limit, int64_t min_blocks) except -1
    cdef void unlock(self, Receipt receipt) noexcept
    cdef int hold_host(self, Receipt receipt, const NativeMatch& found) except -1
    # Takes device blocks for what the device lacks of the held prefix; returns the blocks that a prefix may have.
    cdef int64_t take(self, int64_t num_blocks, spill) except -1
    cdef int list_missing(self, int64_t num_blocks, vector[int64_t]& counts) except -1
    cdef bint is_needed(self, int32_t component, int64_t index, int64_t num_blocks) noexcept
    cdef int allocate(self) except -1
    # Inserts the copied blocks into the device's tree.
    cdef int commit(self, int64_t num_blocks) except -1
    cdef void share_taken(self) noexcept
    # Returns the blocks of the prefix that the device can reuse now.
    cdef int64_t num_reusable(self, int64_t limit) except -1
    # Releases what the promotion holds of the device; the tree keeps what it took.
    cdef void end(self) noexcept
    cdef void release_hold(self) noexcept
