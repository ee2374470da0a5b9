"""Restored blocks: the numbers of sealed blocks in new blocks of the tails, for sequences that are cut inside them."""

from libc.stdint cimport int32_t

from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index._integers cimport new_int32


cdef class Restored:
    """Blocks of the tails for sequences that are cut inside a sealed block.

    `add` lists sequences, `fill` takes the blocks and writes them. Then either `place` gives them to the rows, which
    have been cut, or `give_back` frees them.
    """

    def __cinit__(self, CacheState state not None):
        self.state = state
        self.new = NewBlocks(state.tables)
        self.cuts.resize(state.seals.tails.size())

    cdef int add(self, Sequence sequence, int32_t length) except -1:
        cdef Seals seals = self.state.seals
        cdef Cut cut
        cdef size_t tail
        cut.row, cut.index = sequence.row, length // seals.block_size
        for tail in range(self.cuts.size()):
            # After an operation that sealed more than a commit does, the tail still holds the block.
            if seals.tables.row_raw(cut.row, seals.tails[tail]).data()[cut.index] == 0:
                cut.sealed = seals.tables.row_raw(cut.row, seals.sealed[tail]).data()[cut.index]
                self.cuts[tail].push_back(cut)
                self.new.needed[seals.tails[tail]] += 1
        return 0

    cdef int fill(self) except -1:
        try:
            self.new.take(
                self.state.seals.tails,
                "the tokens of a sealed block that is cut return to a new block: give lengths that are multiples of "
                f"block_size, {self.state.block_size}, or remove a sequence",
            )
            self.doubt()
            self.state.seals.quantise.restore(self.pair_arrays())
        except BaseException:
            self.give_back()
            raise
        return 0

    cdef void doubt(self) noexcept:
        """Note that the blocks may contain values of two namespaces until they are written completely."""
        if self.state.tenants is not None:
            self.state.tenants.doubt(self.new.blocks)

    cdef list pair_arrays(self):
        """Return an array int32 [n, 2] for each tail: sealed blocks, and the blocks of the tail that they fill."""
        cdef int32_t* data = NULL
        cdef int32_t group
        cdef size_t tail, k
        arrays = []
        for tail in range(self.cuts.size()):
            group = self.state.seals.tails[tail]
            array = new_int32(<Py_ssize_t>(2 * self.cuts[tail].size()), &data)
            for k in range(self.cuts[tail].size()):
                data[2 * k], data[2 * k + 1] = self.cuts[tail][k].sealed, self.new.blocks[group][k]
            arrays.append(array.reshape(-1, 2))
        return arrays

    cdef void place(self) noexcept:
        cdef size_t tail, k
        cdef int32_t group, block
        cdef Sequence sequence
        for tail in range(self.cuts.size()):
            group = self.state.seals.tails[tail]
            for k in range(self.cuts[tail].size()):
                block = self.new.blocks[group][k]
                self.state.tables.replace_raw(self.cuts[tail][k].row, group, self.cuts[tail][k].index, block)
                if self.state.tenants is not None:
                    sequence = <Sequence>self.state.by_row[self.cuts[tail][k].row]
                    self.state.tenants.last[group][block] = sequence.tenant
        self.new.forget()

    cdef void give_back(self) noexcept:
        self.new.give_back()
