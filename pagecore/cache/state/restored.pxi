"""Restored blocks: the numbers of sealed blocks in new blocks of the tails, for sequences that are cut inside them."""

from libc.stdint cimport int32_t

from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index._integers cimport new_int32
from pagecore.index.pools._block_pool cimport BlockPool

from pagecore.errors import OutOfBlocks


cdef class Restored:
    """Blocks of the tails for sequences that are cut inside a sealed block.

    `add` lists sequences, `fill` takes the blocks and writes them. Then either `place` gives them to the rows, which
    have been cut, or `give_back` frees them.
    """

    def __cinit__(self, CacheState state not None):
        self.state = state
        self.cuts.resize(state.seals.tails.size())
        self.blocks.resize(state.seals.tails.size())

    cdef int add(self, Sequence sequence, int32_t length) except -1:
        cdef Seals seals = self.state.seals
        cdef Cut cut
        cdef size_t tail
        cut.row, cut.index = sequence.row, length // seals.block_size
        for tail in range(self.cuts.size()):
            # An operation that sealed more than a commit does has left the numbers in the tail.
            if seals.tables.row_raw(cut.row, seals.tails[tail]).data()[cut.index] == 0:
                cut.sealed = seals.tables.row_raw(cut.row, seals.sealed[tail]).data()[cut.index]
                self.cuts[tail].push_back(cut)
        return 0

    cdef int fill(self) except -1:
        try:
            self.take()
            self.doubt()
            self.state.seals.quantise.restore(self.pair_arrays())
        except BaseException:
            self.give_back()
            raise
        return 0

    cdef int take(self) except -1:
        """Take a block for each cut of each tail; raise OutOfBlocks if they are short, with nothing taken."""
        cdef size_t tail
        cdef int32_t group
        cdef list pools = list(self.state.tables.pools)
        needed = [0] * len(pools)
        for tail in range(self.cuts.size()):
            group = self.state.seals.tails[tail]
            needed[group] = self.cuts[tail].size()
            self.blocks[tail].resize(self.cuts[tail].size())
            if not (<BlockPool>pools[group]).try_allocate_raw(self.blocks[tail]):
                self.blocks[tail].clear()
                free = (<BlockPool>pools[group]).num_free_raw()
                raise OutOfBlocks(
                    f"{needed[group]} blocks of group {group} are needed for tokens of sealed blocks that are cut, and "
                    f"{free} are free; give lengths that are multiples of block_size, {self.state.block_size}, or "
                    "remove a sequence",
                    tuple(needed),
                    tuple([(<BlockPool>pool).num_free_raw() for pool in pools]),
                )
        return 0

    cdef void doubt(self) noexcept:
        """Note that the blocks may contain values of two namespaces until they are written completely."""
        cdef size_t tail, k
        if self.state.tenants is None:
            return
        for tail in range(self.blocks.size()):
            for k in range(self.blocks[tail].size()):
                self.state.tenants.last[self.state.seals.tails[tail]][self.blocks[tail][k]] = DOUBTFUL

    cdef list pair_arrays(self):
        """Return an array int32 [n, 2] for each tail: sealed blocks, and the blocks of the tail that they fill."""
        cdef int32_t* data = NULL
        cdef size_t tail, k
        arrays = []
        for tail in range(self.cuts.size()):
            array = new_int32(<Py_ssize_t>(2 * self.cuts[tail].size()), &data)
            for k in range(self.cuts[tail].size()):
                data[2 * k], data[2 * k + 1] = self.cuts[tail][k].sealed, self.blocks[tail][k]
            arrays.append(array.reshape(-1, 2))
        return arrays

    cdef void place(self) noexcept:
        cdef size_t tail, k
        cdef int32_t group, block
        cdef Sequence sequence
        for tail in range(self.blocks.size()):
            group = self.state.seals.tails[tail]
            for k in range(self.blocks[tail].size()):
                block = self.blocks[tail][k]
                self.state.tables.replace_raw(self.cuts[tail][k].row, group, self.cuts[tail][k].index, &block, 1)
                if self.state.tenants is not None:
                    sequence = <Sequence>self.state.by_row[self.cuts[tail][k].row]
                    self.state.tenants.last[group][block] = sequence.tenant
            self.blocks[tail].clear()

    cdef void give_back(self) noexcept:
        cdef size_t tail
        cdef BlockPool pool
        for tail in range(self.blocks.size()):
            pool = <BlockPool>self.state.tables.pools[self.state.seals.tails[tail]]
            pool.free_raw(self.blocks[tail].data(), self.blocks[tail].size())
            self.blocks[tail].clear()
