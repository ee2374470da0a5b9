from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector


cdef class Match:
    cdef readonly int64_t num_tokens
    cdef readonly int64_t num_full_tokens
    cdef readonly object checkpoint
    cdef readonly object state
    cdef readonly object blocks


cdef class Inserted:
    cdef readonly int64_t num_tokens
    cdef readonly int64_t num_old_tokens
    cdef readonly object taken
    cdef readonly object duplicates
    cdef readonly object taken_states
    cdef readonly object duplicate_states


cdef class Evicted:
    cdef readonly int64_t amount
    cdef readonly object blocks
    cdef readonly object states


# A new int32 array.
cdef object array_of(const vector[int32_t]& ids)

# One array where there is one lane, else a tuple of them; what follows the lanes (the states) is left out.
cdef object per_lane(const vector[vector[int32_t]]& ids, int32_t num_lanes)
