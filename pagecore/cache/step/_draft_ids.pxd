# Ids of the drafts of a step; see _draft_ids.pyx.
from libc.stdint cimport int32_t

from pagecore.cache.step._plan cimport StepPlan
from pagecore.index.tables._step_buffers cimport StepBuffers


cdef class DraftIds:
    cdef list given  # of each sequence: Integers, or None without drafts

    # Raises ShapeError unless the drafts are new tokens of the plan's sequences whose ids they do not know.
    cdef int check(self, StepPlan plan) except -1
    # Writes the ids over those of the step's tokens.
    cdef void fill(self, StepPlan plan, StepBuffers buffers) noexcept
