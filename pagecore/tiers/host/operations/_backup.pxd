from libc.stdint cimport int32_t, int64_t

from pagecore.cache.sequences._prefix_hold cimport PrefixHold
from pagecore.cache.sequences._sequence cimport Sequence
from pagecore.cache.state._state cimport CacheState
from pagecore.cache.state._stored cimport StoredBlocks
from pagecore.index.radix._radix_query cimport HintRange, RetentionHint
from pagecore.index.radix._radix_tree cimport Receipt
from pagecore.native.std cimport vector
from pagecore.tiers.host.operations._index cimport HostIndex
from pagecore.tiers.host.operations._lease cimport EntryLease, PrefixKey
from pagecore.tiers.host.operations._path cimport Path


cdef class Backup:
    cdef CacheState state
    cdef HostIndex host
    cdef PrefixKey key
    cdef readonly object options
    cdef RetentionHint hint
    cdef vector[HintRange] ranges               # values by block, in place of `hint`; empty for none
    cdef EntryLease lease
    cdef list parts                             # earlier parts of the copy, whose blocks are in `lanes`; None for none
    cdef Path path                              # of the host, pinned
    cdef vector[vector[int32_t]] lanes          # of each lane: the new host block at each index, 0 for none
    cdef int64_t end                            # blocks of the prefix
    cdef int64_t state_blocks
    cdef int32_t state_slot                     # of the host
    cdef readonly Receipt receipt               # of the device, while the copy runs
    cdef StoredBlocks sources                   # the same
    cdef vector[vector[int32_t]] source_ids     # of each group, states last
    cdef int64_t first                          # blocks that the host had before
    cdef readonly int64_t num_blocks
    cdef readonly list pairs

    # Lists what the host lacks of a sequence, and takes host blocks for it; returns False if there is nothing to do. A
    # host that orders by values takes those of a sequence although it lacks none of its blocks.
    cdef bint plan(self, Sequence sequence, int64_t most, bint is_last) except -1
    cdef int64_t count_kept(self, PrefixHold hold) noexcept
    cdef bint has_copies(self) noexcept
    # Returns True if the host has the state at the end of `state_blocks` blocks.
    cdef bint has_state(self) except -1
    cdef int read_path(self, Sequence sequence) except -1
    # Leaves the device's block of each place that the host lacks in `lanes`, and writes their number by group.
    cdef int list_missing(self, vector[int64_t]& counts) except -1
    # Makes room in the host; if it is short, shortens the prefix to what fits. Returns False if nothing does.
    cdef bint fit(self, vector[int64_t]& counts) except -1
    cdef int64_t keep_last(self, int32_t lane, int64_t room) noexcept
    # Takes the host's blocks, lists the copies, and replaces the device's blocks in `lanes` by the host's.
    cdef int take(self, int32_t slot, const vector[int64_t]& counts) except -1
    cdef int pin_sources(self, Sequence sequence) except -1
    # Publishes the copied blocks in the host's tree, and releases what the backup holds.
    cdef int settle(self) except -1
    cdef void release(self) noexcept
