"""Repacked: new blocks of a compacted sequence in groups of sealed blocks and their tails."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagecore.cache.state._state cimport CacheState, NewBlocks, Seals
from pagecore.index._integers cimport new_int32
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.native.std cimport vector


cdef class Repacked:
    """Blocks for the kept tokens of a sequence, from the first block that changes on.

    `fill` takes and writes them. Then either `place` gives them to the row, which has been cut, or `give_back` frees
    them. No block of the sequence is written, so that an error changes nothing.
    """
    cdef CacheState state
    cdef Plan plan
    cdef NewBlocks new
    cdef int32_t first_block                # the first sealed block that changes
    cdef int32_t num_sealed_blocks          # afterwards
    cdef int32_t first_tail_block           # the first block that changes of those that are not sealed
    cdef int32_t num_blocks                 # afterwards
    cdef vector[vector[int32_t]] indices    # of each group: entries of the row that get new blocks

    def __cinit__(self, CacheState state not None, Plan plan not None):
        cdef int32_t size = state.seals.block_size, group
        self.state, self.plan = state, plan
        self.new = NewBlocks(state.tables)
        self.first_block = min(plan.unmoved, plan.sequence.sealed) // size
        self.num_sealed_blocks, self.num_blocks = plan.sealed // size, (plan.length + size - 1) // size
        self.first_tail_block = max(
            self.num_sealed_blocks,
            self.num_blocks if plan.sequence.sealed <= plan.unmoved == plan.length else plan.unmoved // size,
        )
        self.indices.resize(<size_t>state.tables.num_groups)
        for group in plan.replaced:
            self.list_indices(group)
        for group in plan.moved:
            self.new.needed[group] = self.count_shared(group)

    cdef int list_indices(self, int32_t group) except -1:
        """List the entries of the row that get new blocks: one without sealed numbers does only if it is shared."""
        cdef BlockPool pool = self.state.tables.pools[group]
        cdef bint is_tail = self.state.seals.has_tail(group)
        cdef int32_t index
        if not is_tail:
            for index in range(self.first_block, self.num_sealed_blocks):
                self.indices[group].push_back(index)
        for index in range(self.first_tail_block, self.num_blocks):
            if is_tail or pool.ref_count_raw(self.plan.blocks[group][index]) > 1:
                self.indices[group].push_back(index)
        self.new.needed[group] = <int64_t>self.indices[group].size()
        return 0

    cdef int64_t count_shared(self, int32_t group) noexcept:
        """Return the shared blocks of a group whose tokens move, which `try_compact_raw` replaces."""
        cdef BlockPool pool = <BlockPool>self.state.tables.pools[group]
        cdef int64_t count = 0
        cdef int32_t index
        if self.plan.unmoved < self.plan.length:
            for index in range(self.plan.unmoved // self.state.block_size, self.num_blocks):
                count += pool.ref_count_raw(self.plan.blocks[group][index]) > 1
        return count

    cdef bint fill(self) except -1:
        """Take the blocks and write them; return False, with nothing taken, if code of the caller changed the cache."""
        cdef int64_t operation = self.state.num_operations
        try:
            self.take()
            if self.state.seals.quantise is not None:
                self.state.seals.quantise.repack(self.list_kept())
        except BaseException:
            self.give_back()
            raise
        if self.state.num_operations != operation:
            self.give_back()
            return False
        return True

    cdef int take(self) except -1:
        """Make room for all groups, and take the blocks of those that are replaced."""
        cdef vector[int64_t] missing
        cdef bint is_saved = False
        advice = (
            "kept tokens of sealed blocks move to new blocks, and those of shared blocks do: free some, or remove a "
            "sequence"
        )
        while self.new.lacks(missing):
            if not make_room(self.state, missing, &is_saved):
                self.new.refuse(advice)
        return self.new.take(self.plan.replaced, advice)

    cdef list list_kept(self):
        """Return the fields of `KeptTokens` for each tail."""
        cdef Seals seals = self.state.seals
        cdef size_t at
        cdef int32_t tail, sealed
        kept = []
        for at in range(seals.tails.size()):
            tail, sealed = seals.tails[at], seals.sealed[at]
            kept.append((
                array_of(self.plan.keep[sealed]),
                array_of(self.plan.blocks[sealed]),
                array_of(self.plan.blocks[tail]),
                self.plan.sequence.sealed,
                self.first_block,
                array_of(self.new.blocks[sealed])[:self.num_sealed_blocks - self.first_block],
                self.first_tail_block,
                array_of(self.new.blocks[tail]),
            ))
        return kept

    cdef void place(self) noexcept:
        cdef size_t k
        cdef int32_t group, index, row = self.plan.sequence.row
        for group in self.plan.replaced:
            if self.state.seals.has_tail(group):
                for index in range(self.num_sealed_blocks):
                    if self.plan.blocks[group][index] != 0:
                        self.state.tables.replace_raw(row, group, index, 0)
            for k in range(self.indices[group].size()):
                self.state.tables.replace_raw(row, group, self.indices[group][k], self.new.blocks[group][k])
        self.new.forget()

    cdef void give_back(self) noexcept:
        self.new.give_back()


cdef object array_of(const vector[int32_t]& values):
    cdef int32_t* data = NULL
    array = new_int32(<Py_ssize_t>values.size(), &data)
    if values.size() > 0:
        memcpy(data, values.data(), values.size() * sizeof(int32_t))
    return array
