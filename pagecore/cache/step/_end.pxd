from pagecore.cache.step._record cimport StepRecord

# Each of these does nothing, or ends the flight of the step; see the methods of `Step` with these names.
cdef int commit(StepRecord step, object accepted, object accepted_path, object moves, object save) except -1
cdef int abandon(StepRecord step) except -1
cdef int undo(StepRecord step) except -1
cdef int give_up(StepRecord step) except -1
