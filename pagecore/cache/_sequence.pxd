from libc.stdint cimport int32_t, uint64_t


cdef class Sequence:
    cdef readonly object id
    cdef object owner           # the cache; None once removed
    cdef readonly int32_t row   # in the cache's block tables; -1 once removed, and while swapped out
    cdef readonly object swap_space  # what holds its blocks while it is swapped out; None while the cache does
    cdef int32_t* ids           # the token ids that are known
    cdef int32_t ids_capacity
    cdef int32_t known          # how many ids are known
    cdef int32_t computed       # how many tokens have their key and value written
    cdef int32_t cached         # of those, taken from the prefix cache
    # Its leading blocks that the prefix cache knows and that `_hold` holds; INT32_MAX without one: nothing is ever due.
    cdef public int32_t _published
    cdef public object _hold    # what it holds of the prefix cache; None in a cache without one
    cdef int32_t pending        # tokens of the step in flight; -1 for none
    cdef object flight          # the Step in flight; None for none
    cdef int32_t place          # where that step lists the sequence
    cdef uint64_t seen          # the last load that met this sequence: finds duplicates without a set

    cdef int append(self, const int32_t* ids, int32_t count) except -1


# Leading blocks that are full of computed tokens whose ids are known.
cdef inline int32_t num_whole(Sequence sequence, int32_t block_size) noexcept:
    return min(sequence.known, sequence.computed) // block_size


cdef Sequence require(object owner, object sequence, bint idle)
