# Trees of a step; see _tree.pyx.
from libc.stdint cimport int32_t, int64_t

from pagecore.cache.step._plan cimport StepPlan
from pagecore.index._integers cimport Slots
from pagecore.index.states._state_buffers cimport StateBuffers
from pagecore.index.tables._step_buffers cimport StepBuffers
from pagecore.native.std cimport vector


cdef class StepTree:
    cdef list given               # of each sequence: an int64 array, or None for a chain
    cdef vector[int64_t] parents  # of all tokens of the step, counted within their sequence
    cdef vector[int32_t] depths   # scratch of `fill`

    # Raises ShapeError unless the trees are those of the plan's sequences, and the buffers have room for their bits.
    cdef int check(self, StepPlan plan, StepBuffers buffers) except -1
    # Writes the bits of the step's tokens, and moves their positions to their depths.
    cdef void fill(self, StepPlan plan, StepBuffers buffers) noexcept
    # Lets each draft read the state of its parent; trees keep no checkpoint before they are accepted.
    cdef void fill_states(self, StepPlan plan, StateBuffers states) noexcept
    cdef int check_states(self, StepPlan plan, int32_t index, Slots given) except -1
    cdef bint is_chain(self, int32_t index) noexcept
