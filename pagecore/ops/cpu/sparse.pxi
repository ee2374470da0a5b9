"""Summaries of keys, scores, and the choice of the best."""

from libc.stdint cimport int64_t

from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.cpu.sparse.select cimport (
    ScoreArgs,
    ScoreBatch,
    SelectArgs,
    SummaryArgs,
    run_score,
    run_select,
    run_summarise,
)


cdef int score(const ScoreArgs& args, const ScoreBatch& batch) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_score(args, batch, num_threads)
    return 0


cdef int select(const SelectArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_select(args, num_threads)
    return 0


cdef int summarise(const SummaryArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_summarise(args, num_threads)
    return 0
