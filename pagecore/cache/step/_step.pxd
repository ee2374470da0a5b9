from pagecore.cache.step._record cimport StepRecord


cdef class Step(StepRecord):
    cdef void _leave(self, size_t thread) noexcept


cdef class BatchTicket:
    cdef Step step
