from libc.stdint cimport int32_t, int64_t

from pagecore.native.std cimport vector


cdef class Match:
    cdef readonly int64_t num_tokens
    cdef readonly int64_t num_full_tokens
    cdef readonly object checkpoint
    cdef readonly object state
    cdef readonly object blocks
    cdef readonly int64_t num_shared_tokens
    cdef readonly object shared_blocks


cdef class Inserted:
    cdef readonly int64_t num_tokens
    cdef readonly int64_t num_old_tokens
    # By lane, states last. The arrays are made when first read, because allocating them could fail after the tree has
    # changed.
    cdef vector[vector[int32_t]] taken_ids
    cdef vector[vector[int32_t]] duplicate_ids
    cdef object taken_blocks
    cdef object duplicate_blocks


cdef class Evicted:
    cdef readonly int64_t amount
    cdef vector[vector[int32_t]] gone
    cdef object gone_blocks


# A new int32 array.
cdef object array_of(const vector[int32_t]& ids)

# Arrays of ids by lane, states last: one array for one lane, else a tuple.
cdef object blocks_of(const vector[vector[int32_t]]& ids)
cdef object states_of(const vector[vector[int32_t]]& ids)
