from libc.stdint cimport int32_t, int64_t

from pagecore.cache.state._state cimport CacheState
from pagecore.index.radix._radix_query cimport Mark
from pagecore.native.std cimport vector
from pagecore.tiers.host.operations._backup cimport Backup
from pagecore.tiers.host.operations._index cimport HostIndex
from pagecore.tiers.host.operations._lease cimport EntryLease, PrefixKey


cdef class SpilledPart:
    cdef EntryLease lease
    cdef int64_t begin
    cdef int64_t num_blocks
    cdef bint is_running            # the copy has not ended
    cdef bint is_dropped
    cdef readonly list pairs


cdef class SpilledTail:
    cdef CacheState state
    cdef HostIndex host
    cdef PrefixKey key
    cdef int64_t start
    cdef int64_t end
    cdef int64_t first                      # leading blocks of the path that the host's tree had at the beginning
    cdef vector[vector[int32_t]] lanes      # of each lane: the host block at each index of the path, 0 for none
    cdef list parts                         # the last ones of the path first

    # Returns True if a path ends where the tail starts.
    cdef bint continues_at(self, object key, vector[int32_t]& tokens, vector[Mark]& marks)
    # Returns True if a prompt continues from the device's part of the path into the tail.
    cdef bint is_asked_for(self, object key, const int32_t[::1] tokens)
    # Returns True if a prefix has all blocks of the path.
    cdef bint is_within(self, PrefixKey prefix)
    # Copies the blocks [begin, start); returns False if the host has no room. Later parts are dropped for them.
    cdef bint extend(self, int64_t begin, vector[vector[int32_t]]& device, copy) except -1
    cdef int count(self, int64_t begin, vector[vector[int32_t]]& device, vector[int64_t]& counts) except -1
    cdef object list_copies(
        self, EntryLease lease, int32_t lane, int32_t group, int64_t begin, const vector[int32_t]& device
    )
    # Drops the last part of the path.
    cdef int drop_last(self) except -1
    # Drops blocks at the end of the path, so that `counts` of each group come nearer to being free.
    cdef int shorten(self, vector[int64_t]& counts) except -1
    # Drops the blocks from `end` on; those of a part whose copy runs leave together.
    cdef int cut(self, int64_t end) except -1
    cdef int cut_last(self, int64_t end) except -1
    # Makes room for what the host lacks before the tail; returns False if nothing of the tail is left then.
    cdef bint fit_beginning(self, vector[int64_t] counts) except -1
    # Plans the copy of what the host lacks before the tail; returns False if nothing connects the two.
    cdef bint fill(self, Backup one) except -1
    cdef int64_t read_device(self, vector[vector[int32_t]]& lanes) except -1


# A tail without parts at the end of a path.
cdef SpilledTail new_tail(
    CacheState state, HostIndex host, object key, vector[int32_t]& tokens, vector[Mark]& marks
)
