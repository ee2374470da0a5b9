from libc.stdint cimport int32_t, int64_t

from pagecore.cache.sequences._cross_contents cimport CrossContent
from pagecore.cache.sequences._sequence cimport Sequence
from pagecore.cache.state._state cimport CacheState
from pagecore.cache.step._cross cimport CrossStep
from pagecore.cache.step._draft_ids cimport DraftIds
from pagecore.cache.step._plan cimport StepPlan
from pagecore.cache.step._tree cimport StepTree
from pagecore.index.states._state_buffers cimport StateBuffers
from pagecore.index.tables._block_tables_native cimport BlockCopy, Int32s
from pagecore.index.tables._step_buffers cimport StepBuffers
from pagecore.native.std cimport vector


cdef class StepRecord:
    cdef readonly StepBuffers buffers
    cdef readonly StateBuffers states  # None in a cache without states
    cdef readonly CacheState state
    cdef StepPlan plan             # of the last load
    cdef readonly bint in_flight   # prepared, and neither committed nor abandoned yet
    cdef readonly bint is_lost     # its batch was collected
    cdef bint has_uncopied         # its copies on write have not run yet
    cdef bint is_device_stale      # the device may have padding for slots that the host still has
    cdef public object staged      # StagedPart of a batch on a device; None on the host
    cdef public CrossStep cross    # of a cache with cross attention; else None
    # Scratch of max_sequences entries each, so that a step does not allocate.
    cdef vector[int32_t] accepted
    cdef vector[int32_t] live_rows
    cdef vector[int32_t] lengths
    cdef vector[int32_t] positions
    cdef vector[vector[BlockCopy]] copies  # copies on write of each group
    cdef vector[int32_t] held              # in a cache that scrubs: blocks of the rows before the step, see `Tenants`
    cdef vector[vector[BlockCopy]] stale   # blocks of each group to be zeroed, as targets of a copy
    cdef public StepTree offered           # trees of the step that is taken next; None without trees
    cdef public DraftIds offered_ids       # ids of the drafts of that step; None if there are none
    cdef StepTree tree                     # of the last step
    cdef vector[int32_t] path              # accepted tokens of each sequence, at its first token in the flat arrays
    cdef vector[vector[int64_t]] moved     # of each group: slots that the last commit moved, source and target
    cdef vector[BlockCopy] saves           # scratch: quantised checkpoints of the step that is committed
    cdef vector[size_t] users              # threads that currently write or attend with the step

    cdef list pair_arrays(self, const vector[vector[BlockCopy]]& pairs)
    cdef bint has_stale(self) noexcept
    # True if state slots must be zeroed, copied or loaded before the pass.
    cdef bint has_state_moves(self) noexcept
    # The rows of the first `live` entries of `live_rows`.
    cdef Int32s live_span(self, Py_ssize_t live) noexcept
    # True if the step writes encoder tokens.
    cdef bint writes_cross(self) noexcept
    cdef int require_in_flight(self, str verb) except -1
    cdef bint is_live(self, int32_t index) noexcept
    cdef list live(self)
    # Writes the rows of the live sequences and their lengths after the step; returns their number.
    cdef Py_ssize_t list_live(self, bint is_kept) noexcept
    # Index of the first token of a sequence in the flat arrays of the step.
    cdef int32_t first_token(self, int32_t index) noexcept
    # Raises DeviceError if changes of the step would now be recorded in a graph.
    cdef int check_reachable(self) except -1
    # Sends the slots of the host again.
    cdef int send_slots(self) except -1
    # Sends padding for sequences [first, last) of the step to the device; the host's slots follow after that.
    cdef int skip_on_device(self, int32_t first, int32_t last) except -1
    # The slots of an encoder output that loses its last holder become padding: on the device, then on the host.
    cdef int skip_content_on_device(self, CrossContent content) except -1
    cdef void skip_content(self, CrossContent content) noexcept
    # The slots of a sequence that is removed become padding: first those on the device, then those on the host.
    cdef int skip_sequence_on_device(self, Sequence sequence) except -1
    cdef void skip_sequence(self, Sequence sequence) noexcept
