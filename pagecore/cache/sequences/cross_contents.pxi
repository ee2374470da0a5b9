"""Encoder contents: keys and values of encoder outputs, which sequences share and which never change once written.

    sequences   a, b, c   d        a was forked into b and c; d was added with another output
                   |      |
    contents       A      B        one row each in block tables of their own, whose length is set once
                   |      |
    blocks        94     94        1,500 tokens in blocks of 16

A content has no row until the first step of one of its sequences takes its blocks. Commit makes it written; abandon
takes the blocks back. The last sequence that leaves it frees them. Nothing evicts the blocks of a content that a
sequence holds, and no prefix tree knows them.

C1: a content has a row iff a step in flight writes it, or it is written and not in a swap space; its row has the length
    of the content. It is in a swap space only while all of its holders are swapped out.
C2: at most one step in flight writes a content.
C3: every row of the tables belongs to one content with holders, and the tables alone hold the blocks of their pools.
"""

from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport const_int32
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._radix cimport key_of
from pagecore.index.tables._tables cimport BlockTables
from pagecore.native.std cimport span, vector

from pagecore.errors import OutOfBlocks, OutOfRows, PagecoreError, ShapeError


cdef class CrossContent:
    """The keys and values of one encoder output.

    Parameters
    ----------
    key : tuple or None
        Identity of the output, of immutable built-in values; None for an output that no later sequence finds.
    num_tokens : int
    """

    def __cinit__(self, key, int32_t num_tokens):
        self.key = key
        self.num_tokens = num_tokens
        self.row = -1


def content_key(namespace, digest):
    """Return the key of an encoder output: equal keys have equal namespaces and digests, of equal types."""
    return key_of((namespace, digest))


cdef class CrossContents:
    """The contents of a cache, and the block tables of its cross-attention groups.

    Parameters
    ----------
    tables : BlockTables
        Empty tables with one group for each group of cross-attention layers.
    max_tokens : int
        Most tokens of a content.
    """

    def __cinit__(self, BlockTables tables not None, int32_t max_tokens):
        self.tables = tables
        self.max_tokens = max_tokens
        self.block_size = tables.block_sizes[0]
        self.by_key = {}
        self.needed.resize(<size_t>tables.num_groups)

    cdef CrossContent find(self, object key, int32_t num_tokens):
        cdef CrossContent content
        if key is not None:
            there = self.by_key.get(key)
            # An output in a swap space is left to its own sequences: it would have to be brought back.
            if there is not None and (<CrossContent>there).num_holders > 0 and (<CrossContent>there).stored is None:
                content = <CrossContent>there
                if content.num_tokens != num_tokens:
                    raise ShapeError(
                        f"cross_tokens is {num_tokens}, but the encoder output with this digest has "
                        f"{content.num_tokens} tokens; pass a digest of the encoder's whole input"
                    )
                return content
        content = CrossContent(key, num_tokens)
        if key is not None:
            self.by_key[key] = content
        return content

    cdef void hold(self, CrossContent content) noexcept:
        content.num_holders += 1

    cdef void release(self, CrossContent content) noexcept:
        content.num_holders -= 1
        if content.num_holders > 0:
            return
        self.free(content)
        self.unlist(content)

    cdef void unlist(self, CrossContent content) noexcept:
        if content.key is not None and self.by_key.get(content.key) is content:
            del self.by_key[content.key]

    cdef void count_needed(self, list contents) noexcept:
        cdef size_t group
        cdef int64_t total = 0
        for content in contents:
            if (<CrossContent>content).row < 0:
                total += ((<CrossContent>content).num_tokens + self.block_size - 1) // self.block_size
        for group in range(self.needed.size()):
            self.needed[group] = total

    cdef bint take(self, list contents) except -1:
        cdef size_t group
        self.is_short = False
        self.count_needed(contents)
        for group in range(self.needed.size()):
            if self.needed[group] > (<BlockPool>self.tables.pools[group]).num_free_raw():
                self.is_short = True
        if self.is_short:
            return False
        self.require_rows(len(contents))
        try:
            for content in contents:
                self.add_row(<CrossContent>content)
        except BaseException:
            for content in contents:
                self.free(<CrossContent>content)
            raise
        return True

    cdef int require_rows(self, Py_ssize_t count) except -1:
        if count > self.tables.num_free_rows():
            raise OutOfRows(
                f"{count} rows of encoder outputs are needed and {self.tables.num_free_rows()} are free; remove "
                "sequences that are swapped out, or raise max_sequences"
            )
        return 0

    cdef int add_row(self, CrossContent content) except -1:
        cdef vector[vector[int32_t]] blocks
        cdef size_t group, taken = 0
        cdef size_t count = <size_t>((content.num_tokens + self.block_size - 1) // self.block_size)
        blocks.resize(self.needed.size())
        for group in range(blocks.size()):
            blocks[group].resize(count)
        try:
            for group in range(blocks.size()):
                if not (<BlockPool>self.tables.pools[group]).try_allocate_raw(blocks[group]):
                    raise OutOfBlocks("the blocks of an encoder output were counted as free and are not")
                taken += 1
            self.add_filled_row(content, blocks)
        finally:
            # The row has references of its own.
            for group in range(taken):
                (<BlockPool>self.tables.pools[group]).free_raw(blocks[group].data(), count)
        return 0

    cdef int add_filled_row(self, CrossContent content, const vector[vector[int32_t]]& blocks) except -1:
        cdef vector[span[const_int32]] spans
        cdef size_t group
        cdef int32_t row
        spans.resize(blocks.size())
        for group in range(blocks.size()):
            spans[group] = span[const_int32](blocks[group].data(), blocks[group].size())
        row = self.tables.add_raw(spans)
        # The row is there, and can be cut to its length without failing.
        content.row = row
        self.tables.truncate_raw(&row, &content.num_tokens, 1, True)
        return 0

    cdef void free(self, CrossContent content) noexcept:
        if content.row >= 0:
            self.tables.remove_raw(&content.row, 1)
        content.row = -1
        content.is_written = False
        content.stored = content.space = None

    # -- for Python ------------------------------------------------------------------------------------------------

    @property
    def num_rows(self):
        """Number of contents that have blocks."""
        return self.tables.num_rows

    def available(self):
        """Return the number of free blocks of each group."""
        counts = []
        for pool in self.tables.pools:
            counts.append(pool.num_free)
        return counts

    def refuse(self, int32_t first_group):
        """Return the OutOfBlocks error of the last `take`; its figures are those of the cross groups."""
        wanted, free = [], []
        for needed, left in zip(self.needed, self.available()):
            wanted.append(needed)
            free.append(left)
        text = ", ".join([
            f"{count} blocks are needed for encoder tokens and {left} are free in group {first_group + i}"
            for i, (count, left) in enumerate(zip(wanted, free))
        ])
        figures = (wanted[0], free[0]) if len(wanted) == 1 else (tuple(wanted), tuple(free))
        return OutOfBlocks(f"{text}; remove a sequence or make the pool larger", *figures)

    def check_invariants(self, contents):
        """Recount rows and holders; raise PagecoreError if they differ.

        Parameters
        ----------
        contents : iterable of CrossContent
            The content of each sequence that has one; it is listed once for each of its holders.
        """
        cdef CrossContent content
        cdef dict holders = {}
        self.tables.check_invariants(exclusive=True)
        for content in contents:
            holders[content] = holders.get(content, 0) + 1
        rows = set()
        for content, count in holders.items():
            if content.num_holders != count:
                raise PagecoreError(f"an encoder output counts {content.num_holders} holders, but {count} hold it")
            if (content.row >= 0) != (content.is_written and content.stored is None or content.writer is not None):
                raise PagecoreError(f"an encoder output in row {content.row} is neither written nor being written")
            if content.num_swapped > count or (content.stored is not None and content.num_swapped < count):
                raise PagecoreError(f"an encoder output counts {content.num_swapped} of {count} holders as swapped out")
            if content.row >= 0:
                rows.add(content.row)
                if self.tables.length(content.row) != content.num_tokens:
                    raise PagecoreError(f"row {content.row} of encoder outputs does not have its content's length")
        if len(rows) != self.tables.num_rows:
            raise PagecoreError(f"{self.tables.num_rows} rows of encoder outputs are used, but {len(rows)} are held")
