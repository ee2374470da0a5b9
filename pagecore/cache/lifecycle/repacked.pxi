"""Repacked: new blocks of a compacted sequence in groups of sealed blocks and their tails."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagecore.cache.state._state cimport CacheState, Seals
from pagecore.index._integers cimport new_int32
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.native.std cimport vector

from pagecore.errors import OutOfBlocks


cdef class Repacked:
    """Blocks for the kept tokens of a sequence, from the first block that changes on.

    `fill` takes and writes them. Then either `place` gives them to the row, which has been cut, or `give_back` frees
    them. No block of the sequence is written, so that an error changes nothing.
    """
    cdef CacheState state
    cdef Plan plan
    cdef int32_t first, sealed, last                # blocks that stay, blocks that are sealed, and all blocks
    cdef vector[vector[int32_t]] indices, blocks    # of each group that is replaced: indices, and new blocks there

    def __cinit__(self, CacheState state not None, Plan plan not None):
        cdef int32_t size = state.seals.block_size
        self.state, self.plan = state, plan
        self.first = min(plan.unmoved, plan.sequence.sealed) // size
        self.sealed, self.last = plan.sealed // size, (plan.length + size - 1) // size
        self.indices.resize(plan.replaced.size())
        self.blocks.resize(plan.replaced.size())
        self.list_indices()

    cdef int list_indices(self) except -1:
        """List the entries of the rows that get new blocks: a block that is not sealed yet may stay if it is not shared."""
        cdef size_t at
        cdef int32_t group, index, old
        for at in range(self.blocks.size()):
            group = self.plan.replaced[at]
            for index in range(self.first, self.last):
                old = self.plan.blocks[group][index]
                if self.state.seals.has_tail(group):
                    if index < self.sealed:
                        continue
                elif index >= self.sealed and (<BlockPool>self.state.tables.pools[group]).ref_count_raw(old) == 1:
                    continue
                self.indices[at].push_back(index)
        return 0

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
        cdef vector[int64_t] missing
        cdef bint is_saved = False
        cdef size_t at
        while self.lacks(missing):
            if not make_room(self.state, missing, &is_saved):
                self.refuse()
        for at in range(self.blocks.size()):
            self.blocks[at].resize(self.indices[at].size())
            if not (<BlockPool>self.state.tables.pools[self.plan.replaced[at]]).try_allocate_raw(self.blocks[at]):
                self.blocks[at].clear()
                self.refuse()
        return 0

    cdef bint lacks(self, vector[int64_t]& missing) except -1:
        """Write the blocks that each group lacks; return True if any does."""
        cdef size_t at
        cdef int32_t group
        cdef bint is_short = False
        missing.assign(<size_t>self.state.tables.num_groups, 0)
        for at in range(self.blocks.size()):
            group = self.plan.replaced[at]
            missing[group] = max(
                0, <int64_t>self.indices[at].size() - (<BlockPool>self.state.tables.pools[group]).num_free_raw()
            )
            is_short = is_short or missing[group] > 0
        return is_short

    cdef int refuse(self) except -1:
        cdef size_t at
        pools = self.state.tables.pools
        needed = [0] * len(pools)
        for at in range(self.blocks.size()):
            needed[self.plan.replaced[at]] = self.indices[at].size()
        free = [(<BlockPool>pool).num_free_raw() for pool in pools]
        text = ", ".join([
            f"{needed[group]} blocks are needed and {free[group]} are free in group {group}"
            for group in range(len(pools)) if needed[group] > free[group]
        ])
        raise OutOfBlocks(
            f"{text}; kept tokens of sealed blocks move to new blocks: free some, or remove a sequence",
            tuple(needed), tuple(free),
        )

    cdef list list_kept(self):
        """Return the fields of `KeptTokens` for each tail."""
        cdef Seals seals = self.state.seals
        cdef size_t tail
        kept = []
        for tail in range(seals.tails.size()):
            kept.append((
                array_of(self.plan.keep[seals.sealed[tail]]),
                array_of(self.plan.blocks[seals.sealed[tail]]),
                array_of(self.plan.blocks[seals.tails[tail]]),
                self.plan.sequence.sealed,
                self.first,
                array_of(self.blocks[2 * tail + 1])[:self.sealed - self.first],
                array_of(self.blocks[2 * tail]),
            ))
        return kept

    cdef void place(self) noexcept:
        cdef size_t at, k
        cdef int32_t group, index, hole = 0, row = self.plan.sequence.row
        for at in range(self.blocks.size()):
            group = self.plan.replaced[at]
            if self.state.seals.has_tail(group):
                for index in range(self.sealed):
                    self.state.tables.replace_raw(row, group, index, &hole, 1)
            for k in range(self.blocks[at].size()):
                self.state.tables.replace_raw(row, group, self.indices[at][k], &self.blocks[at][k], 1)
            self.blocks[at].clear()

    cdef void give_back(self) noexcept:
        cdef size_t at
        for at in range(self.blocks.size()):
            (<BlockPool>self.state.tables.pools[self.plan.replaced[at]]).free_raw(
                self.blocks[at].data(), self.blocks[at].size()
            )
            self.blocks[at].clear()


cdef object array_of(const vector[int32_t]& values):
    cdef int32_t* data = NULL
    array = new_int32(<Py_ssize_t>values.size(), &data)
    if values.size() > 0:
        memcpy(data, values.data(), values.size() * sizeof(int32_t))
    return array
