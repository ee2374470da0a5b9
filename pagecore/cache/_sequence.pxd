from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.cache._hold cimport PrefixHold


cdef class Sequence:
    cdef readonly object id
    cdef object owner           # the CacheState; None before it is in a cache, and once it is removed
    cdef readonly int32_t row   # in the cache's block tables; -1 once removed, and while swapped out
    cdef readonly object swap_space  # that holds its blocks while it is swapped out; None while the cache does
    cdef object stored          # its StoredBlocks there; None while the cache holds them
    cdef int32_t* ids           # the token ids that are known
    cdef int32_t ids_capacity
    cdef int32_t known          # how many ids are known
    cdef int32_t computed       # how many tokens have their key and value written
    cdef int32_t cached         # of those, taken from the prefix cache
    cdef PrefixHold hold        # None in a cache without a prefix cache
    # Its leading blocks that the prefix cache knows and that `hold` holds; INT32_MAX where nothing is ever published.
    cdef int32_t published
    cdef int64_t tenant         # of its namespace in `Tenants`; 0 in a cache that does not scrub
    cdef bint is_cut            # its hold ends one block past `published`: it was truncated inside that block
    cdef bint has_duplicates    # it has blocks of its own for some that the prefix cache has from another
    cdef int32_t pending        # tokens of the step in flight; -1 for none
    cdef object flight          # the Step in flight; None for none
    cdef int32_t place          # its place in that step
    cdef uint64_t seen          # the last load that met this sequence: finds duplicates without a set

    # Room for `count` more ids; raises MemoryError or ShapeError, and changes nothing that shows.
    cdef int reserve(self, int64_t count) except -1
    # Adds ids for which there is room.
    cdef void append(self, const int32_t* ids, int32_t count) noexcept


# Leading blocks that are full of computed tokens whose ids are known.
cdef inline int32_t num_whole(Sequence sequence, int32_t block_size) noexcept:
    return min(sequence.known, sequence.computed) // block_size


# A sequence that is in no cache yet.
cdef Sequence new_sequence(object id, const int32_t[::1] ids)

# `sequence` as a live Sequence of `owner`; with `idle`, one with a row and no step in flight.
cdef Sequence require(object owner, object sequence, bint idle)
# Each of `sequences` so, no two of them the same.
cdef list require_each(object owner, object sequences, bint idle)
