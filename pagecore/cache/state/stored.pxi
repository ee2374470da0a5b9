"""References to blocks of several pools, released on request or when the holder is collected."""

cimport cython
from libc.stdint cimport int32_t

from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.native.std cimport vector

import numpy as np


@cython.no_gc_clear  # otherwise its pools could be gone by the time it is collected
cdef class StoredBlocks:
    """One reference to each of the listed blocks; one list for each group.

    Parameters
    ----------
    pools : tuple of BlockPool
        Pool of each group.
    """

    def __cinit__(self, tuple pools not None):
        self.pools = pools
        self.blocks.resize(len(pools))
        self.held.resize(len(pools))

    def __dealloc__(self):
        self.release()

    cdef int reserve(self, const vector[vector[int32_t]]& like) except -1:
        cdef size_t group
        copy_vector(self.blocks, like)
        for group in range(like.size()):
            self.held[group].reserve(like[group].size())
        return 0

    cdef bint allocate(self) noexcept:
        cdef size_t group
        for group in range(self.blocks.size()):
            if not (<BlockPool>self.pools[group]).try_allocate_raw(self.blocks[group]):
                self.release()
                return False
            self.list_held(group)
        return True

    cdef void share(self) noexcept:
        cdef size_t group
        for group in range(self.blocks.size()):
            self.list_held(group)
            (<BlockPool>self.pools[group]).share_raw(self.held[group].data(), self.held[group].size())

    cdef void list_held(self, size_t group) noexcept:
        """Note that the blocks of a group are held, tail first."""
        cdef size_t i = self.blocks[group].size()
        self.held[group].clear()
        while i > 0:
            i -= 1
            if self.blocks[group][i] != 0:
                self.held[group].push_back(self.blocks[group][i])
        self.num_held = group + 1

    cdef void drop_last(self, size_t group, size_t count) noexcept:
        (<BlockPool>self.pools[group]).free_raw(self.held[group].data(), count)
        self.held[group].erase(self.held[group].begin(), self.held[group].begin() + count)
        self.blocks[group].resize(self.blocks[group].size() - count)

    cdef void release(self) noexcept:
        cdef size_t group
        for group in range(self.num_held):
            (<BlockPool>self.pools[group]).free_raw(self.held[group].data(), self.held[group].size())
        self.num_held = 0

    @property
    def arrays(self):
        """The blocks of each group: a tuple of int32 arrays, copies; holes are 0."""
        cdef size_t group
        arrays = []
        for group in range(self.blocks.size()):
            arrays.append(np.array(self.blocks[group], np.int32))
        return tuple(arrays)


def hold(tuple pools not None, counts):
    """Hold up to `counts` free blocks of each pool; return the holder, which releases them, and their numbers."""
    cdef StoredBlocks stored = StoredBlocks(pools)
    cdef vector[vector[int32_t]] like
    cdef size_t group
    like.resize(len(pools))
    for group, count in enumerate(counts):
        like[group].resize(max(0, min(count, (<BlockPool>pools[group]).num_free_raw())))
    stored.reserve(like)
    stored.allocate()
    held = []
    for group in range(like.size()):
        held.append(like[group].size())
    return stored, held
