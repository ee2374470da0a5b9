from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._cache cimport PrefixCache
from pagecore.cache.sequences._cross_contents cimport CrossContents
from pagecore.cache.sequences._kept cimport KeptKeys
from pagecore.cache.sequences._sequence cimport Sequence
from pagecore.cache.state._lock cimport StateLock
from pagecore.cache.state._tenants cimport Tenants
from pagecore.index.states._state_table cimport StateTable
from pagecore.index.tables._block_tables cimport BlockTables
from pagecore.native.std cimport vector


cdef class CacheState:
    cdef readonly BlockTables tables
    cdef readonly StateTable states         # None in a cache without layers that keep states
    cdef readonly PrefixCache prefix        # None in a cache without one
    cdef readonly Tenants tenants           # None in a cache that does not scrub
    cdef readonly CrossContents cross       # None in a cache without cross attention
    cdef readonly StateLock lock            # held by every operation
    # A PrefixObserver, called under the lock: before a sequence is added, after a commit, before a removal; or None.
    cdef public object observer
    cdef readonly object removal            # removes a sequence when its context ends
    cdef dict names                         # sequence by id; entries whose sequence is not live are leftovers
    cdef list by_row                        # the sequence in each row; None for a free row
    cdef vector[KeptKeys] kept              # of each group that does not keep all keys
    cdef readonly int32_t block_size
    cdef readonly int32_t num_live          # sequences, including those that are swapped out
    # Steps whose batch was collected before it was committed or abandoned, and pins that were collected.
    cdef int32_t num_lost
    cdef readonly bint lacks_slots          # the last step that was refused lacks state slots, not blocks
    cdef readonly int64_t num_copied_blocks
    cdef int64_t next_number

    # First call of every operation, under the lock: reads the clock and abandons lost steps.
    cdef int begin(self) except -1
    # First call of every query: abandons lost steps, without the clock.
    cdef int sweep(self) except -1
    # Waits until no other thread writes or attends with a step.
    cdef int wait_for(self, object step) except -1
    # Writes the first block of each group that a sequence of `length` tokens keeps; 0 without a window.
    cdef int list_first_kept(self, int64_t length, vector[int32_t]& out) except -1
    # Checks an id; returns an unused number for None.
    cdef object new_name(self, object name)
    # Lists a sequence under its id before it is live, which the caller cannot observe.
    cdef int reserve_name(self, Sequence sequence) except -1
    # Unlists a sequence that is no longer live.
    cdef int drop_name(self, Sequence sequence) except -1
    cdef int sweep_names(self) except -1
