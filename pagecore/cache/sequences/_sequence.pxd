from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.cache.sequences._cross_contents cimport CrossContent
from pagecore.cache.sequences._prefix_hold cimport PrefixHold


cdef class Sequence:
    cdef readonly object id
    cdef object owner           # the CacheState; None before it is in a cache, and after it was removed
    cdef readonly int32_t row   # in the cache's block tables; -1 once removed, and while swapped out
    cdef readonly object swap_space  # the space that holds its blocks while it is swapped out; else None
    cdef object stored          # its StoredBlocks in that space; else None
    cdef int32_t* ids           # the known token ids
    cdef int32_t ids_capacity
    cdef int32_t known          # number of known ids
    cdef int32_t computed       # number of tokens whose key and value are written
    cdef int32_t dropped        # number of tokens that compact removed: positions run ahead of the cache by it
    cdef int32_t compacted      # number of computed tokens after the last compact; 0 without one
    cdef int32_t cached         # number of computed tokens that came from the prefix cache
    cdef int32_t matched        # tokens in blocks that the prefix cache shared when the sequence was added
    cdef CrossContent cross     # its encoder output; None if it has none yet, or in a cache without cross attention
    cdef PrefixHold hold        # the prefix cache's record of the sequence; None in a cache without a prefix cache
    cdef int64_t tenant         # of its namespace in `Tenants`; 0 in a cache that does not scrub
    cdef int32_t pending        # tokens of the step in flight; -1 without one
    cdef object flight          # the Step in flight; None without one
    cdef int32_t step_index     # its index among the sequences of that step
    cdef uint64_t last_list     # number of the last checked list that had this sequence: finds duplicates without a set

    # Reserves room for `count` more ids; raises NotEnoughMemory or ShapeError.
    cdef int reserve(self, int64_t count) except -1
    # Adds ids for which room was reserved.
    cdef void append(self, const int32_t* ids, int32_t count) noexcept


# Returns the number of leading blocks that are full of computed tokens with known ids.
cdef inline int32_t num_whole(Sequence sequence, int32_t block_size) noexcept:
    return min(sequence.known, sequence.computed) // block_size


# Returns a sequence that is not in a cache yet.
cdef Sequence new_sequence(object id, const int32_t[::1] ids)

# Returns `sequence` as a live Sequence of `owner`; with `idle`, it must have a row and no step in flight.
cdef Sequence require(object owner, object sequence, bint idle)
# Returns `sequences` as a list in which each passed `require` and none occurs twice.
cdef list require_each(object owner, object sequences, bint idle)
