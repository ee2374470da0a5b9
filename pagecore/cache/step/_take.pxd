from pagecore.cache.step._record cimport StepRecord

# Takes the blocks of the loaded step, fills its buffers and plans its attention; returns False, with nothing changed,
# if blocks are short. See `Step.take`.
cdef bint take(StepRecord step, list plans, copy) except -1
