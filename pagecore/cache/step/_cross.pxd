from libc.stdint cimport int32_t, int64_t

from pagecore.cache.sequences._cross_contents cimport CrossContent, CrossContents
from pagecore.cache.sequences._sequence cimport Sequence
from pagecore.index.tables._step_buffers cimport StepBuffers


cdef class CrossStep:
    cdef readonly CrossContents contents
    cdef readonly StepBuffers buffers   # rows, lengths and slots of encoder tokens
    cdef public list plans              # AttentionPlan of each cross group that has one
    cdef public object staged           # StagedPart of a batch on a device; None on the host
    cdef list written                   # contents that the step writes, in the order of their slots

    # Takes the blocks of the contents that the step writes; returns False, with nothing changed, if blocks are short.
    # Raises ShapeError or InvalidSequence for sequences that cannot attend.
    cdef bint take(self, list sequences, const int32_t* counts) except -1
    # Takes the blocks back before `begin`.
    cdef void give_back(self) noexcept
    # Marks the contents as written by `step`, and fills the buffers for `n` sequences.
    cdef void begin(self, object step, list sequences, int32_t n) noexcept
    cdef void write_slots(self, CrossContent content, int32_t first) noexcept
    # Plans the attention of each group for the queries of the step.
    cdef int replan(self, StepBuffers queries) except -1
    # The contents are written, or their blocks are taken back and their slots become padding.
    cdef void end(self, bint is_kept) noexcept
    # The slots of a content that loses its last holder become padding: first those on the device, then on the host.
    cdef int skip_on_device(self, CrossContent content) except -1
    cdef void skip(self, CrossContent content) noexcept


# Returns the contents that a step of these sequences writes, each once, in the order of their first sequences.
cdef list contents_to_write(CrossContents contents, list sequences, const int32_t* counts)
cdef int64_t num_tokens_of(list contents) noexcept
