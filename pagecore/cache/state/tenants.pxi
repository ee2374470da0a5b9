"""Tenants of blocks in a cache that scrubs: the namespace whose values each block may still hold.

A tenant is the number of a namespace. Before a step takes a block, it zeroes the block if another tenant used it last:

    mark of the block       action for a step of tenant 7
    CLEAN                   none: the block holds zeros
    7                       none: the block holds zeros and values of tenant 7
    5, or DOUBTFUL          zero the block in every plane of every layer

T1: A block that is marked with a tenant holds zeros and that tenant's values, in every slot.
T2: A block that a row holds is marked with a tenant: that of the row, or an older number of the same namespace.

A namespace whose number was forgotten gets a new number. Its old blocks are then zeroed unnecessarily, and T1 still
holds. Numbers are never reused.
"""

from libc.stdint cimport int32_t, int64_t
from libcpp.algorithm cimport binary_search, sort

from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.tables._native cimport BlockCopy, Int32s
from pagecore.index.tables._tables cimport BlockTables
from pagecore.native.std cimport vector

from pagecore.errors import PagecoreError

cdef enum:
    CLEAN = 0
    DOUBTFUL = -1
    COPIED = -2  # within one call: doubtful, but a copy overwrites the block, so that it is not zeroed
    # Source block of the pairs that zero a block; all blocks of that source are zeros.
    ZEROS = 1
    MIN_NAMES = 4096
    BLOCKS_PER_NAME = 16  # makes the search for namespaces without a block O(1) per new namespace


cdef class Tenants:
    """The last tenant of each block of each group.

    Parameters
    ----------
    tables : BlockTables
        Tables of a cache whose memory contains only zeros.

    Attributes
    ----------
    num_scrubbed_blocks : int
        Number of blocks that steps have zeroed.
    """

    def __cinit__(self, BlockTables tables not None):
        cdef size_t group
        self.tables = tables
        self.block_size = tables.block_sizes[0]
        self.numbers = {}
        self.next_number = 1
        self.last.resize(<size_t>tables.num_groups)
        for group in range(self.last.size()):
            self.last[group].resize(<size_t>(<BlockPool>tables.pools[group]).num_blocks, CLEAN)
        self.limit = max(<size_t>MIN_NAMES, self.num_blocks() // BLOCKS_PER_NAME)

    def num_blocks(self):
        """Return the number of blocks of all groups."""
        cdef size_t group
        return sum([self.last[group].size() for group in range(self.last.size())])

    cdef int64_t number_of(self, object key) except -1:
        cdef int64_t number
        found = self.numbers.get(key)
        if found is not None:
            return <int64_t>found
        if <size_t>len(self.numbers) >= self.limit:
            self.forget_unused()
        number = self.next_number
        self.next_number += 1
        self.numbers[key] = number
        return number

    cdef int forget_unused(self) except -1:
        """Forget the namespaces that are not the mark of any block."""
        cdef vector[int64_t] used
        cdef size_t group
        for group in range(self.last.size()):
            used.insert(used.end(), self.last[group].begin(), self.last[group].end())
        sort(used.begin(), used.end())
        kept = {}
        for key, number in self.numbers.items():
            if binary_search(used.begin(), used.end(), <int64_t>number):
                kept[key] = number
        self.limit = max(<size_t>MIN_NAMES, max(2 * <size_t>len(kept), used.size() // BLOCKS_PER_NAME))
        self.numbers = kept
        return 0

    # -- a step ----------------------------------------------------------------------------------------------------

    cdef int note_held(self, list sequences, vector[int32_t]& held) except -1:
        cdef size_t group, k, first
        cdef Int32s row
        cdef Sequence sequence
        held.clear()
        for sequence in sequences:
            first = self.first_block(sequence)
            for group in range(self.last.size()):
                row = self.tables.row_raw(sequence.row, <int64_t>group)
                held.push_back(<int32_t>(max(first, row.size()) - first))
                for k in range(first, row.size()):
                    held.push_back(row[k])
        return 0

    cdef int list_stale(
        self, list sequences, const vector[int32_t]& held, const vector[vector[BlockCopy]]& copies,
        vector[vector[BlockCopy]]& stale
    ) except -1:
        cdef size_t group
        stale.resize(self.last.size())
        for group in range(self.last.size()):
            stale[group].clear()
        self.mark_targets(copies)
        try:
            self.compare_rows(sequences, held, stale)
        finally:
            self.doubt_copied(copies)
        return 0

    cdef int compare_rows(
        self, list sequences, const vector[int32_t]& held, vector[vector[BlockCopy]]& stale
    ) except -1:
        """List the blocks that rows took since `note_held`, unless they are clean for the row's tenant."""
        cdef size_t group, k, first, kept, place = 0
        cdef Int32s row
        cdef BlockCopy pair
        cdef Sequence sequence
        pair.source = ZEROS
        for sequence in sequences:
            first = self.first_block(sequence)
            for group in range(self.last.size()):
                row = self.tables.row_raw(sequence.row, <int64_t>group)
                kept = <size_t>held[place]
                for k in range(first, row.size()):
                    if k - first < kept and row[k] == held[place + 1 + k - first]:
                        continue
                    if row[k] != 0 and not self.is_clean_for(sequence.tenant, self.last[group][row[k]]):
                        pair.target = row[k]
                        stale[group].push_back(pair)
                place += 1 + kept
        return 0

    cdef size_t first_block(self, Sequence sequence) noexcept:
        """Return the index of the block of the sequence's next token."""
        return <size_t>sequence.computed // <size_t>self.block_size

    cdef bint is_clean_for(self, int64_t tenant, int64_t last) noexcept:
        return last == tenant or last == CLEAN or last == COPIED

    cdef void mark_targets(self, const vector[vector[BlockCopy]]& copies) noexcept:
        """Mark the targets of copies on write; a copy may stop half-way and leave some of the old values."""
        cdef size_t group, k
        cdef int64_t there, tenant
        for group in range(copies.size()):
            for k in range(copies[group].size()):
                there = self.last[group][copies[group][k].target]
                tenant = self.last[group][copies[group][k].source]
                self.last[group][copies[group][k].target] = tenant if there in (CLEAN, tenant) else COPIED

    cdef void doubt_copied(self, const vector[vector[BlockCopy]]& copies) noexcept:
        cdef size_t group, k
        for group in range(copies.size()):
            for k in range(copies[group].size()):
                if self.last[group][copies[group][k].target] == COPIED:
                    self.last[group][copies[group][k].target] = DOUBTFUL

    cdef void settle(self, list sequences, const vector[vector[BlockCopy]]& stale) noexcept:
        cdef size_t group
        cdef Sequence sequence
        for sequence in sequences:
            if sequence.row >= 0:
                self.mark(sequence.row, self.first_block(sequence), sequence.tenant)
        for group in range(stale.size()):
            self.num_scrubbed_blocks += <int64_t>stale[group].size()

    # -- swapping --------------------------------------------------------------------------------------------------

    cdef void doubt(self, const vector[vector[int32_t]]& blocks) noexcept:
        cdef size_t group, k
        # Slots of states may follow, which are zeroed when they are taken. Tails of sealed blocks may be missing.
        for group in range(min(self.last.size(), blocks.size())):
            for k in range(blocks[group].size()):
                if blocks[group][k] != 0:
                    self.last[group][blocks[group][k]] = DOUBTFUL

    cdef void own_row(self, int32_t row, int64_t tenant) noexcept:
        self.mark(row, 0, tenant)

    cdef void mark(self, int32_t row, size_t first, int64_t tenant) noexcept:
        """Mark the blocks of a row from index `first` on."""
        cdef size_t group, k
        cdef Int32s blocks
        for group in range(self.last.size()):
            blocks = self.tables.row_raw(row, <int64_t>group)
            for k in range(first, blocks.size()):
                if blocks[k] != 0:
                    self.last[group][blocks[k]] = tenant

    # -- for Python ------------------------------------------------------------------------------------------------

    def check_invariants(self, sequences):
        """Raise PagecoreError if a block of a row is not marked with a tenant."""
        cdef size_t group, k
        cdef Int32s blocks
        cdef Sequence sequence
        for sequence in sequences:
            if sequence.row < 0:
                continue
            for group in range(self.last.size()):
                blocks = self.tables.row_raw(sequence.row, <int64_t>group)
                for k in range(blocks.size()):
                    if blocks[k] != 0 and self.last[group][blocks[k]] <= CLEAN:
                        raise PagecoreError(
                            f"{sequence!r} holds block {blocks[k]} of group {group}, which is not marked with a tenant"
                        )
