"""New blocks of several groups: all that an operation needs, or none."""

from libc.stdint cimport int32_t, int64_t

from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.tables._tables cimport BlockTables
from pagecore.native.std cimport vector

from pagecore.errors import OutOfBlocks


cdef class NewBlocks:
    """Blocks that an operation takes and fills before it changes rows, so that an error leaves the rows as they are.

    The operation sets `needed` and calls `take`. Then rows get the blocks and it calls `forget`, or it calls
    `give_back`.
    """

    def __cinit__(self, BlockTables tables not None):
        self.pools = tables.pools
        self.needed.assign(<size_t>len(self.pools), 0)
        self.blocks.resize(<size_t>len(self.pools))

    cdef bint lacks(self, vector[int64_t]& missing) except -1:
        cdef size_t group
        cdef bint is_short = False
        missing.resize(self.needed.size())
        for group in range(self.needed.size()):
            missing[group] = max(0, self.needed[group] - (<BlockPool>self.pools[group]).num_free_raw())
            is_short = is_short or missing[group] > 0
        return is_short

    cdef int take(self, const vector[int32_t]& groups, str advice) except -1:
        cdef size_t i
        cdef int32_t group
        for i in range(groups.size()):
            group = groups[i]
            self.blocks[group].resize(<size_t>self.needed[group])
            if not (<BlockPool>self.pools[group]).try_allocate_raw(self.blocks[group]):
                self.blocks[group].clear()
                self.give_back()  # before the free blocks are counted
                self.refuse(advice)
        return 0

    cdef int refuse(self, str advice) except -1:
        needed = tuple(self.needed)
        free = tuple([(<BlockPool>pool).num_free_raw() for pool in self.pools])
        text = ", ".join([
            f"{needed[group]} blocks are needed and {free[group]} are free in group {group}"
            for group in range(len(needed)) if needed[group] > free[group]
        ])
        raise OutOfBlocks(f"{text}; {advice}", needed, free)

    cdef void give_back(self) noexcept:
        cdef size_t group
        for group in range(self.blocks.size()):
            (<BlockPool>self.pools[group]).free_raw(self.blocks[group].data(), self.blocks[group].size())
            self.blocks[group].clear()

    cdef void forget(self) noexcept:
        cdef size_t group
        for group in range(self.blocks.size()):
            self.blocks[group].clear()
