"""References to blocks of several pools, given back when they are released or forgotten."""

from libc.stdint cimport int32_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from pagecore.index._block_pool cimport BlockPool
from pagecore.index._integers cimport new_int32


cdef class StoredBlocks:
    """One reference to each block that is listed, in one list for each group.

    Attributes
    ----------
    arrays : tuple of numpy.ndarray
        int32, the blocks of each group; holes are 0.
    """

    def __cinit__(self, tuple pools not None):
        self.pools = pools
        self.held.resize(len(pools))

    def __dealloc__(self):
        self.release()

    @staticmethod
    def allocate(tuple pools not None, counts):
        """Take new blocks of each pool; None, with nothing taken, where one has too few."""
        cdef StoredBlocks stored = StoredBlocks(pools)
        cdef int32_t* data = NULL
        cdef Py_ssize_t group, i, size
        arrays = []
        for group in range(len(pools)):
            size = counts[group]
            arrays.append(new_int32(size, &data))
            stored.held[group].resize(<size_t>size)
            if not (<BlockPool>pools[group]).try_allocate_raw(stored.held[group]):
                return None
            stored.num_held += 1
            for i in range(size):
                data[i] = stored.held[group][i]
        stored.arrays = tuple(arrays)
        for group in range(len(pools)):
            reverse(stored.held[group])
        return stored

    @staticmethod
    def share(tuple pools not None, tuple arrays not None):
        """Add a reference to each block of `arrays`, which somebody holds already."""
        cdef StoredBlocks stored = StoredBlocks(pools)
        cdef const int32_t[::1] blocks
        cdef Py_ssize_t group, i
        for group in range(len(pools)):
            blocks = arrays[group]
            for i in range(blocks.shape[0] - 1, -1, -1):
                if blocks[i] != 0:
                    stored.held[group].push_back(blocks[i])
        stored.arrays = arrays
        for group in range(len(pools)):
            (<BlockPool>pools[group]).share_raw(stored.held[group].data(), stored.held[group].size())
            stored.num_held += 1
        return stored

    cdef void release(self) noexcept:
        cdef size_t group
        for group in range(self.num_held):
            (<BlockPool>self.pools[group]).free_raw(self.held[group].data(), self.held[group].size())
        self.num_held = 0


cdef void reverse(vector[int32_t]& values) noexcept:
    cdef size_t i
    cdef size_t size = values.size()
    cdef int32_t value
    for i in range(size // 2):
        value = values[i]
        values[i] = values[size - 1 - i]
        values[size - 1 - i] = value
