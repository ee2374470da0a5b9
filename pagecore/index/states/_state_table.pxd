from pagecore.index._integers cimport Integers
from pagecore.index.states._state_buffers cimport StateBuffers
from pagecore.index.states._state_table_core cimport StateTableCore
from pagecore.index.tables._step_buffers cimport StepBuffers


cdef class StateTable(StateTableCore):
    cdef bint lacks_slots  # the last step that was refused was short of slots, not of blocks

    cdef bint _try_prepare(
        self, Integers rows, Integers counts, StepBuffers buffers, StateBuffers states, bint keeps
    ) except -1
    cdef object _end(self, object rows, bint has_run)
