from libc.stdint cimport int32_t, int64_t

from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.native.std cimport vector


# Durations in buckets: `counts` has one more entry than there are bounds.
cdef class Durations:
    cdef vector[int64_t] bounds     # ns, ascending
    cdef vector[int64_t] counts
    cdef double total               # ns

    cdef void add(self, int64_t duration) noexcept


cdef class WatchedPool(BlockPool):
    cdef readonly BlockPool pool
    cdef vector[int32_t] sample_of  # number of each sampled block; 0 for the others
    # Of each sample, in ns: the time at which the tree took the block, and that of its last use; 0 if the tree has not
    # taken it since the start.
    cdef vector[int64_t] taken_at
    cdef vector[int64_t] used_at
    cdef Durations lifetimes, idle_times, reuse_gaps

    # Note that the tree's blocks are part of a prefix hit.
    cdef void note_hit(self, const int32_t* blocks, size_t count) noexcept
