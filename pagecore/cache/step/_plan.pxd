from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.cache.sequences._kept cimport KeptKeys
from pagecore.cache.state._state cimport CacheState
from pagecore.index.tables._block_tables_native cimport Int32s
from pagecore.native.std cimport vector


cdef class StepPlan:
    cdef readonly CacheState state
    cdef list sequences
    cdef readonly int32_t num_sequences
    cdef readonly int64_t num_tokens
    cdef readonly bint is_arrival
    cdef uint64_t num_fills
    # One entry for each sequence; the vectors may be longer.
    cdef vector[int32_t] rows
    cdef vector[int32_t] counts
    cdef vector[int32_t] first_blocks  # of an arrival: the first block that each group takes; else empty
    cdef vector[int64_t] missing       # of each group
    cdef int64_t missing_slots         # of states; 0 in a cache without states
    cdef vector[int64_t] limits        # the most blocks of a row in each group, for tokens of several steps; else empty
    cdef vector[int64_t] lacking       # scratch of `count_lacking`
    cdef vector[int32_t] converted     # scratch of `fill` and `count_lacking`

    cdef int reserve(self, size_t num_sequences) except -1
    # Checks and stores the sequences of a step and their counts.
    cdef int fill(
        self, list sequences, object counts, bint is_arrival, int64_t max_sequences, int64_t max_tokens
    ) except -1
    # Checks the stored sequences again, after code of the caller may have run.
    cdef int recheck(self) except -1
    cdef int64_t convert(self, object counts, int32_t num_sequences) except -1
    cdef int list_rows(self) except -1
    # The sequences with new tokens that were truncated inside a block which they share with the tree.
    cdef list list_writers(self)
    # Counts the blocks that each group lacks; a row takes no more than its group's limit leaves.
    cdef int count_lacking(self) except -1
    # The blocks of encoder tokens that each cross group lacks.
    cdef list missing_cross(self)
    cdef int cap_counts(self, const KeptKeys& keys) except -1
    cdef int64_t num_own(self, int32_t index, int32_t group, int64_t first, int64_t end) noexcept
    # Counts the blocks that each group lacks and the state slots, evictable ones subtracted; returns True if none lack.
    cdef bint count_missing(self, list writers) except -1
    cdef int count_missing_slots(self) except -1
    # The slots that a step without checkpoints lacks if other rows take `others` slots; see count_missing_slots().
    cdef int64_t least_slots(self, int64_t others) except -1
    cdef Int32s row_span(self) noexcept
    cdef Int32s count_span(self) noexcept
