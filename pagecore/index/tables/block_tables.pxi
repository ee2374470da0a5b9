"""Block tables: the blocks that hold the tokens of each sequence."""

from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport Integers, as_counts, as_int64, as_integers, as_row, const_int32
from pagecore.native.std cimport span, vector

from pagecore.errors import InvalidBlock, InvalidSequence, ShapeError, UnsupportedOption


cdef class BlockTables(TableSteps):
    """BlockTables(pools, *, block_sizes=16, max_sequences, max_blocks_per_sequence)\n--\n\n\
Block tables of sequences, for one group of layers or several.

    A sequence is a row. A row has one length and, in each group, a list of blocks, whose leading entries can be holes
    (block 0) that `release_before` leaves. Rows and counts are an int or anything that NumPy converts to a
    one-dimensional array of integers. A call that fails changes nothing, in no row, group or pool. The tables have one
    writer; their pools may have other users. When the tables are freed, their references go back to the pools.
    Copy-on-write follows vLLM's block tables, lists with holes its sliding-window manager.

    Parameters
    ----------
    pools : BlockPool or sequence of BlockPool
        A sequence of pools has one for each group (a pool may serve several groups). Results that exist once for each
        group are then tuples, even for one group.
    block_sizes : int or sequence of int
        Tokens in a block.
    max_sequences : int
        Number of rows.
    max_blocks_per_sequence : int
        Most blocks of a row, in each group.

    Attributes
    ----------
    pools : tuple of BlockPool
    block_sizes : tuple of int

    Raises
    ------
    ShapeError
        A size is out of range, or the number of block sizes differs from that of the pools.
    NotEnoughMemory
        The tables do not fit in memory.

    Examples
    --------
    >>> tables = BlockTables(BlockPool(17), block_sizes=4, max_sequences=2, max_blocks_per_sequence=8)
    >>> row = tables.add()
    >>> tables.extend(row, 7)
    array([ 4,  5,  6,  7,  8,  9, 10])
    >>> tables.blocks(row)
    array([1, 2], dtype=int32)
    """

    def add(self, prefix=None, length=None):
        """Start a sequence in the lowest unused row.

        Parameters
        ----------
        prefix : array_like of int, optional
            Full blocks that the sequence begins with; each gets one more reference. Zeros are holes. With
            groups, one list for each, all for the same number of tokens.
        length : int, optional
            Tokens of the prefix that count as computed; by default all. A step over the others neither copies nor
            writes their blocks, and its slots there are -1: layers with a state compute these tokens again, and the
            keys and values that attention reads are there already. `truncate` below the row's length ends that.

        Returns
        -------
        int
            The row. Its length is `length`, 0 without a prefix.

        Raises
        ------
        OutOfRows
            Every row is in use.
        ShapeError
            The prefix is too long, or its length differs between groups, or `length` is not within it.
        InvalidBlock, DoubleFree
            A prefix block is outside its pool, or is free, or is a hole after `length` tokens.
        """
        cdef vector[span[const_int32]] lists
        cdef Integers blocks
        keep = []
        if prefix is not None:
            for part in as_tuple(prefix, "prefix") if self.is_grouped else (prefix,):
                blocks = as_integers(part, "block", InvalidBlock)
                keep.append(blocks)
                lists.push_back(view(blocks))
            if lists.size() != <size_t> len(self.pools):
                raise ShapeError(f"expected {len(self.pools)} prefix lists, one for each group, got {lists.size()}")
        cdef int64_t computed = -1 if length is None else max(as_int64(length, "length"), -2)
        if length is not None and computed < 0:
            raise ShapeError(f"length is {length}; use 0 or more")
        cdef object added = self._next_row()  # made before anything changes
        self.add_raw(lists, computed)
        return added

    def fork(self, row):
        """Start a sequence that shares all blocks of `row`; the first row to write a shared block gets a copy.

        Returns
        -------
        int
            The new row, of the same length.

        Raises
        ------
        InvalidSequence, OutOfRows
        """
        cdef int32_t parent = as_row(row)
        cdef object added = self._next_row()
        self.fork_raw(parent)
        return added

    def remove(self, rows):
        """End sequences: drop the references to their blocks, tail first.

        Raises
        ------
        InvalidSequence
            A row is unused or repeated.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        self.remove_raw(which.data, which.size)

    def reorder(self, rows, parents):
        """Give ``rows[i]`` the contents that ``parents[i]`` had before the call (beam search); parents may repeat.

        Raises
        ------
        InvalidSequence
            A row or parent is not in use, or a row is named twice.
        ShapeError
            The numbers of parents and rows differ.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers sources = as_integers(parents, "parent", InvalidSequence)
        self._reorder(view(which), view(sources))

    def truncate(self, rows, lengths, keep_capacity=False):
        """Truncate rows to `lengths` tokens and free the blocks past the last one needed, tail first.

        Parameters
        ----------
        rows : int or array_like of int
            Distinct rows.
        lengths : int or array_like of int
            0 to the length of the row; one int applies to all rows.
        keep_capacity : bool
            Keep the blocks as spare capacity, such as after rejected draft tokens. If False, existing spare capacity is
            freed, too.

        Raises
        ------
        ShapeError
            A length is negative or exceeds that of its row.
        InvalidSequence
            A row is unused or repeated.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers kept = as_counts(lengths, which.size, "length")
        cdef bint keeps = as_flag(keep_capacity, "keep_capacity")
        self.truncate_raw(which.data, kept.data, which.size, keeps)

    def release_before(self, rows, group, positions, first=0):
        """Replace every whole block before a position by a hole: the window has moved past it.

        Parameters
        ----------
        rows : int or array_like of int
            Distinct rows.
        group : int
        positions : int or array_like of int
            0 to the length of the row; one int applies to all rows.
        first : int
            Blocks of tokens before `first` stay: the sink tokens of a window.

        Returns
        -------
        int
            The number of blocks that became free.

        Raises
        ------
        ShapeError
            A position is negative or exceeds the length of its row, `first` is negative, or there is no such group.
        InvalidSequence
            A row is unused or repeated.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef int64_t of = as_int64(group, "group")
        cdef Integers until = as_counts(positions, which.size, "position")
        return self.release_before_raw(which.data, of, until.data, which.size, as_int64(first, "first"))

    def __repr__(self):
        return f"BlockTables(block_sizes={self.block_sizes}): {self.num_rows} of {self.max_sequences} rows in use"


cdef bint as_flag(object value, str name) except -1:
    if value is not True and value is not False:
        raise UnsupportedOption(f"{name} is {type(value).__name__}; use True or False")
    return value
