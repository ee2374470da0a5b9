from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector

from pagecore.cache._sequence cimport Sequence
from pagecore.cache._state cimport CacheState
from pagecore.index._block_tables cimport BlockCopy, StepBuffers


cdef class Step:
    cdef readonly StepBuffers buffers
    cdef readonly CacheState state
    cdef readonly bint in_flight   # prepared, and neither committed nor abandoned yet
    cdef readonly bint is_lost     # its batch was collected
    cdef readonly bint is_arrival  # of the last load: its tokens were computed elsewhere
    cdef bint has_uncopied         # its copies on write have not been run yet
    cdef bint is_device_stale      # slots on the device may be padding that the host does not have
    cdef public object staged      # the StagedBatch of a batch on a device; None on the host
    cdef list sequences            # of the last load, in order
    cdef int32_t count
    # Scratch of max_sequences entries each, so that a step allocates nothing.
    cdef vector[int32_t] rows
    cdef vector[int32_t] counts
    cdef vector[int32_t] accepted
    cdef vector[int32_t] live_rows
    cdef vector[int32_t] lengths
    cdef vector[int32_t] positions
    cdef vector[int32_t] first_blocks      # of an arrival: the first block that each group takes; else empty
    cdef vector[int64_t] missing           # of each group
    cdef vector[vector[BlockCopy]] copies  # copy-on-write of each group
    cdef vector[int32_t] held              # in a cache that scrubs: blocks of the rows before the step, see `Tenants`
    cdef vector[vector[BlockCopy]] stale   # blocks of each group to be zeroed, as targets of a copy
    cdef vector[size_t] users              # threads that write or attend with it now

    cdef int _take_counts(self, object counts) except -1
    cdef int _check_size(self, Py_ssize_t size) except -1
    cdef int32_t _checked(self, int64_t count) except -1
    cdef int _read_accepted(self, object accepted) except -1
    cdef void _leave(self, size_t thread) noexcept
    cdef int _require_in_flight(self, str verb) except -1
    cdef int _check_reachable(self) except -1
    cdef int _skip_on_device(self, int32_t first, int32_t last) except -1
    cdef list _writers(self)
    cdef bint _try_take(self, list writers) except -1
    cdef int _begin(self) except -1
    cdef list _pair_arrays(self, const vector[vector[BlockCopy]]& pairs)
    cdef bint _has_stale(self) noexcept
    cdef void _fill_token_ids(self) noexcept
    cdef list _live(self)
    cdef Py_ssize_t _list_live(self, bint is_kept) noexcept
    cdef void _end(self, bint is_kept) noexcept
    cdef int _undo_copies(self) except -1
    cdef int _undo(self) except -1
    cdef int _release_windows(self, Py_ssize_t live) except -1
    cdef bint _is_live(self, int32_t place) noexcept
    # The tokens of a sequence that goes: nothing is written for them any more.
    cdef int32_t first_token(self, int32_t place) noexcept
    cdef int skip_on_device(self, Sequence sequence) except -1
    cdef void skip(self, Sequence sequence) noexcept


cdef class BatchTicket:
    cdef Step step
