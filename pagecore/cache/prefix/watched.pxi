"""A pool that times the lives of sampled blocks in the prefix tree.

The prefix cache takes a reference to each block that the tree takes, and drops it when the tree evicts the block. A
`WatchedPool` has the references of another pool and notes both moments, and the prefix hits between them:

    taken            hit            hit                    released
      |---- gap -----|----- gap -----|------- idle ----------|
      |----------------------- lifetime ---------------------|

W1: A life is counted from its beginning or not at all: blocks that the tree has when the pool is made are left out.
The calls run no Python code and allocate nothing. A block that is not sampled costs one load.
"""

from libc.stdint cimport int32_t, int64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from pagecore.index.pools._block_pool cimport BlockPool

import numpy as np


cdef int64_t monotonic_ns() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <int64_t>now.tv_sec * 1_000_000_000 + now.tv_nsec


cdef class Durations:
    """A histogram of durations.

    Parameters
    ----------
    bounds : array_like of int64
        Upper bounds of the buckets in nanoseconds, ascending; the last bucket has none.
    """

    def __cinit__(self, bounds):
        cdef int64_t bound
        for bound in bounds:
            self.bounds.push_back(bound)
        self.counts.resize(self.bounds.size() + 1)

    cdef void add(self, int64_t duration) noexcept:
        cdef size_t bucket = 0
        while bucket < self.bounds.size() and duration > self.bounds[bucket]:
            bucket += 1
        self.counts[bucket] += 1
        self.total += duration

    def read(self):
        """Return the number of durations in each bucket, int64, a new array, and their sum in nanoseconds."""
        cdef size_t i
        counts = np.empty(self.counts.size(), np.int64)
        for i in range(self.counts.size()):
            counts[i] = self.counts[i]
        return counts, self.total


cdef class WatchedPool(BlockPool):
    """The references of another pool; see `watched_pool`."""

    cdef void share_raw(self, const int32_t* blocks, size_t count) noexcept:
        cdef int64_t now = 0
        cdef int32_t sample
        cdef size_t i
        for i in range(count):
            sample = self.sample_of[blocks[i]]
            if sample != 0:
                now = monotonic_ns() if now == 0 else now
                self.taken_at[sample] = self.used_at[sample] = now
        BlockPool.share_raw(self, blocks, count)

    cdef int32_t free_raw(self, const int32_t* blocks, size_t count) noexcept:
        cdef int64_t now = 0
        cdef int32_t sample
        cdef size_t i
        for i in range(count):
            sample = self.sample_of[blocks[i]]
            if sample != 0 and self.taken_at[sample] != 0:
                now = monotonic_ns() if now == 0 else now
                self.lifetimes.add(now - self.taken_at[sample])
                self.idle_times.add(now - self.used_at[sample])
                self.taken_at[sample] = 0
        return BlockPool.free_raw(self, blocks, count)

    cdef void note_hit(self, const int32_t* blocks, size_t count) noexcept:
        cdef int64_t now = 0
        cdef int32_t sample
        cdef size_t i
        for i in range(count):
            sample = self.sample_of[blocks[i]]
            if sample != 0 and self.taken_at[sample] != 0:
                now = monotonic_ns() if now == 0 else now
                self.reuse_gaps.add(now - self.used_at[sample])
                self.used_at[sample] = now


def watched_pool(
    BlockPool pool not None,
    const int32_t[::1] blocks not None,
    Durations lifetimes not None,
    Durations idle_times not None,
    Durations reuse_gaps not None,
):
    """Return a pool with the references of `pool` that times the lives of `blocks`.

    Parameters
    ----------
    pool : BlockPool
    blocks : int32 [n]
        The sampled blocks: distinct ids of the pool, without the null block.
    lifetimes, idle_times, reuse_gaps : Durations
        Time from taking to release; time since the last use when the block is released; time between two uses.
    """
    cdef WatchedPool watched = WatchedPool(2, order=pool.order)
    cdef Py_ssize_t i
    watched.native = pool.native
    watched.num_blocks = pool.num_blocks
    watched.pool = pool
    watched.lifetimes, watched.idle_times, watched.reuse_gaps = lifetimes, idle_times, reuse_gaps
    watched.sample_of.resize(<size_t>pool.num_blocks)
    watched.taken_at.resize(<size_t>blocks.shape[0] + 1)
    watched.used_at.resize(<size_t>blocks.shape[0] + 1)
    for i in range(blocks.shape[0]):
        watched.sample_of[blocks[i]] = <int32_t>i + 1
    return watched
