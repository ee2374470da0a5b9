"""Which blocks hold the tokens of each sequence."""

from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from cython.operator cimport dereference as deref
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy
from libcpp.memory cimport shared_ptr
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.index._block_pool cimport BlockPool, NativeBlockPool
from pagecore.index._integers cimport (
    Integers,
    address_of,
    as_counts,
    as_int64,
    as_integers,
    as_row,
    const_int32,
    new_int32,
    writable,
)
from pagecore.index._native_view cimport view_of
from pagecore.index._step_buffers cimport SlotsOut, SlotType, StepBuffers

import numpy as np

from pagecore.errors import InvalidBlock, InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption

# Steps of more tokens than this ask for blocks before they ask for memory to write slots into.
cdef enum: MAX_TOKENS_UNASKED = 1 << 16

cdef inline Int32s view(Integers values):
    return span[const_int32](values.data, <size_t> values.size)


cdef class BlockTables:
    """BlockTables(pools, *, block_sizes=16, max_sequences, max_blocks_per_sequence)\n--\n\n\
The block tables of sequences, for one group of layers or several.

    A sequence is a row. A row has one length and, in each group, a run of blocks; leading blocks can be holes (block
    0), which `release_before` leaves. Rows and counts are taken as one int or as anything that NumPy makes a
    one-dimensional array of integers. A call that fails changes nothing, in no row, group or pool. There is one writer;
    the pools may be used by others meanwhile. When the tables go, the references that they hold go back to the pools.
    Tables with copy-on-write follow vLLM's block tables; the run with holes follows its sliding-window manager.

    Parameters
    ----------
    pools : BlockPool or sequence of BlockPool
        A sequence has one pool for each group (a pool may serve several), and then every result that exists once for
        each group is a tuple, also for one group.
    block_sizes : int or sequence of int
        Tokens of a block.
    max_sequences : int
        Rows.
    max_blocks_per_sequence : int
        Blocks of a row, in every group.

    Attributes
    ----------
    pools : tuple of BlockPool
    block_sizes : tuple of int

    Raises
    ------
    ShapeError
        A size is out of range, or pools and block sizes do not go together.
    NotEnoughMemory
        The tables are larger than memory.

    Examples
    --------
    >>> tables = BlockTables(BlockPool(17), block_sizes=4, max_sequences=2, max_blocks_per_sequence=8)
    >>> row = tables.add()
    >>> tables.extend(row, 7)
    array([ 4,  5,  6,  7,  8,  9, 10])
    >>> tables.blocks(row)
    array([1, 2], dtype=int32)
    """

    def __cinit__(self, pools, *, block_sizes=16, max_sequences, max_blocks_per_sequence):
        cdef vector[shared_ptr[NativeBlockPool]] native_pools
        cdef vector[int64_t] sizes
        self.is_grouped = not isinstance(pools, BlockPool)
        self.pools = as_tuple(pools, "pools") if self.is_grouped else (pools,)
        for pool in self.pools:
            if not isinstance(pool, BlockPool):
                raise UnsupportedOption(f"a pool is of type {type(pool).__name__}; give BlockPool objects")
            native_pools.push_back((<BlockPool> pool).native)
        try:
            self.block_sizes = tuple(block_sizes)
        except TypeError:
            self.block_sizes = (block_sizes,) * len(self.pools)
        for size in self.block_sizes:
            sizes.push_back(as_int64(size, "block_size"))
        self.block_sizes = tuple(sizes)
        self.native.reset(new NativeBlockTables(
            native_pools, sizes, as_int64(max_sequences, "max_sequences"),
            as_int64(max_blocks_per_sequence, "max_blocks_per_sequence"),
        ))

    # Rows come and go.

    def add(self, prefix=None):
        """Start a sequence in the lowest row that is not in use.

        Parameters
        ----------
        prefix : array_like of int, optional
            Blocks that the sequence begins with, all full; each gets one more reference. Leading zeros are holes. With
            groups, one such list for each; all come to the same number of tokens.

        Returns
        -------
        int
            The row, of length 0 or of the prefix's tokens.

        Raises
        ------
        OutOfRows
            Every row is in use.
        ShapeError
            The prefix is too long, or not equally long in all groups.
        InvalidBlock, DoubleFree
            A prefix block is outside its pool, or held by nobody.
        """
        cdef vector[span[const_int32]] lists
        cdef Integers blocks
        keep = []
        if prefix is not None:
            for part in as_tuple(prefix, "prefix") if self.is_grouped else (prefix,):
                blocks = as_integers(part, "block", InvalidBlock)
                keep.append(blocks)
                lists.push_back(view(blocks))
            if lists.size() != deref(self.native).num_groups():
                raise ShapeError(f"the prefix has {lists.size()} lists; give one for each of {self.num_groups} groups")
        cdef object added = deref(self.native).next_row()  # made before anything changes
        deref(self.native).add(lists)
        return added

    def fork(self, row):
        """Start a sequence that shares all blocks of `row`; whoever writes a shared block first gets a copy.

        Returns
        -------
        int
            The new row, of the same length.

        Raises
        ------
        InvalidSequence, OutOfRows
        """
        cdef int32_t parent = as_row(row)
        cdef object added = deref(self.native).next_row()
        deref(self.native).fork(parent)
        return added

    def remove(self, rows):
        """End sequences: drop the references to their blocks, tail first.

        Raises
        ------
        InvalidSequence
            A row is not in use, or is named twice.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        deref(self.native).remove(view(which))

    def reorder(self, rows, parents):
        """Make ``rows[i]`` what ``parents[i]`` was before the call (beam search); parents may repeat.

        Raises
        ------
        InvalidSequence
            A row or parent is not in use, or a row is named twice.
        ShapeError
            There are not as many parents as rows.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers sources = as_integers(parents, "parent", InvalidSequence)
        deref(self.native).reorder(view(which), view(sources))

    # Tokens come and go.

    def extend(self, rows, counts, out=None):
        """Make room for ``counts[i]`` more tokens of ``rows[i]``; their lengths advance.

        A row's spare capacity is used first. A block that is written and has other holders is replaced by a new one;
        if it holds tokens of the row, `take_copies` will say so.

        Parameters
        ----------
        rows : int or array_like of int
            Distinct rows.
        counts : int or array_like of int
            Tokens for each row, 0 or more; one int stands for all rows.
        out : numpy.ndarray, optional
            int64 or int32, contiguous, with room for all new tokens; with groups, a sequence of one for each.

        Returns
        -------
        numpy.ndarray
            int64 [sum(counts)], slots of the new tokens, row after row: new, or the front of `out`. With groups, a
            tuple of one for each.

        Raises
        ------
        OutOfBlocks
            A pool has fewer free blocks than the rows need.
        ShapeError
            A count is negative, a row would be longer than it can be, `out` is too small or cannot name the slots.
        InvalidSequence
            A row is not in use, or is named twice.
        """
        return self._extend(rows, counts, out, True)

    def try_extend(self, rows, counts, out=None):
        """Do what `extend` does, but return None where blocks are short."""
        return self._extend(rows, counts, out, False)

    cdef object _extend(self, object rows, object counts, object out, bint must):
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers added = as_counts(counts, which.size, "count")
        cdef int64_t num_tokens = deref(self.native).check_step(view(which), view(added))
        cdef vector[SlotsOut] targets
        cdef SlotsOut target
        if num_tokens > MAX_TOKENS_UNASKED and self._is_short(which, added):
            if must:
                self.fail_out_of_blocks()
            return None
        slots = []
        for array in self._slot_targets(out, num_tokens):
            target.data = address_of(array)
            target.size = array.size
            target.type = SlotType.Int64 if array.itemsize == 8 else SlotType.Int32
            targets.push_back(target)
            slots.append(array if array.size == num_tokens else array[:num_tokens])
        result = tuple(slots) if self.is_grouped else slots[0]
        if not deref(self.native).try_extend(view(which), view(added), targets):
            if must:
                self.fail_out_of_blocks()
            return None
        return result

    cdef list _slot_targets(self, object out, int64_t num_tokens):
        cdef list targets = []
        if out is None:
            for _ in range(len(self.pools)):
                targets.append(np.empty(num_tokens, np.int64))
            return targets
        for array in as_tuple(out, "out") if self.is_grouped else (out,):
            targets.append(writable(array, 1, "out", True))
        return targets

    def shortage(self, rows, counts, first_blocks=None):
        """Blocks that `extend` would lack; 0 means that it will succeed. Nothing changes.

        Parameters
        ----------
        rows, counts
            As `extend`.
        first_blocks : int or array_like of int, optional
            As `prepare`: blocks that it would lack.

        Returns
        -------
        int
            With groups, a tuple; groups that share a pool are served in their order.

        Raises
        ------
        ShapeError, InvalidSequence
            As `extend`.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers added = as_counts(counts, which.size, "count")
        cdef vector[int64_t] missing
        cdef vector[int32_t] firsts
        missing.resize(len(self.pools))
        self._read_first_blocks(first_blocks, firsts)
        deref(self.native).shortage(view(which), view(added), missing, firsts)
        return tuple(missing) if self.is_grouped else missing[0]

    cdef bint _is_short(self, Integers rows, Integers counts) except -1:
        cdef vector[int64_t] missing
        cdef vector[int32_t] all_blocks
        missing.resize(len(self.pools))
        deref(self.native).shortage(view(rows), view(counts), missing, all_blocks)
        for lacking in missing:
            if lacking > 0:
                return True
        return False

    cdef int _read_first_blocks(self, object first_blocks, vector[int32_t]& out) except -1:
        if first_blocks is not None:
            given = as_counts(first_blocks, len(self.pools), "first block")
            out.assign(given.data, given.data + given.size)
        return 0

    def prepare(self, rows, counts, buffers, first_blocks=None):
        """Extend rows and fill the buffers of a step, in one native call that allocates nothing.

        Parameters
        ----------
        rows, counts
            As `extend`.
        buffers : StepBuffers
            Overwritten; unchanged where the call fails.
        first_blocks : int or array_like of int, optional
            For tokens that were computed elsewhere and have left a window: the first block, counted from the start of
            each row, that the call takes in each group; one int stands for all groups. The row keeps the blocks before
            it that it has; the others are holes. Slots of tokens before it are -1. By default every block is taken.

        Raises
        ------
        OutOfBlocks, ShapeError, InvalidSequence
            As `extend`; ShapeError also where the buffers are too small, made for another number of groups, or of
            int32 slots that cannot name a pool of more than 2**31, and where a first block is negative.
        """
        if not self.try_prepare(rows, counts, buffers, first_blocks):
            self.fail_out_of_blocks()

    def try_prepare(self, rows, counts, buffers, first_blocks=None):
        """Do what `prepare` does, but return False where blocks are short, and else True."""
        if not isinstance(buffers, StepBuffers):
            raise UnsupportedDtype(f"buffers is {type(buffers).__name__}; give StepBuffers")
        cdef StepBuffers steps = <StepBuffers> buffers
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers added = as_counts(counts, which.size, "count")
        cdef vector[int32_t] firsts
        self._read_first_blocks(first_blocks, firsts)
        return deref(self.native).try_prepare(view(which), view(added), deref(steps.native), firsts)

    cdef bint try_prepare_raw(
        self, const int32_t* rows, const int32_t* counts, Py_ssize_t n, StepBuffers out,
        const vector[int32_t]& first_blocks
    ) except -1:
        return deref(self.native).try_prepare(
            span[const_int32](rows, <size_t> n), span[const_int32](counts, <size_t> n), deref(out.native), first_blocks
        )

    cdef Int32s row_raw(self, int32_t row, int64_t group) noexcept:
        return deref(self.native).known_blocks(row, group)

    cdef int32_t length_raw(self, int32_t row) noexcept:
        return deref(self.native).known_length(row)

    cdef int64_t num_free_rows(self) noexcept:
        return deref(self.native).max_sequences() - deref(self.native).num_rows()

    cdef int32_t add_raw(self, const vector[span[const_int32]]& prefix) except -1:
        return deref(self.native).add(prefix)

    cdef int32_t fork_raw(self, int32_t row) except -1:
        return deref(self.native).fork(row)

    cdef int remove_raw(self, const int32_t* rows, Py_ssize_t n) except -1:
        deref(self.native).remove(span[const_int32](rows, <size_t> n))
        return 0

    cdef int reorder_raw(self, const int32_t* rows, const int32_t* parents, Py_ssize_t n) except -1:
        deref(self.native).reorder(span[const_int32](rows, <size_t> n), span[const_int32](parents, <size_t> n))
        return 0

    cdef int truncate_raw(
        self, const int32_t* rows, const int32_t* lengths, Py_ssize_t n, bint keep_capacity
    ) except -1:
        deref(self.native).truncate(
            span[const_int32](rows, <size_t> n), span[const_int32](lengths, <size_t> n), keep_capacity
        )
        return 0

    cdef int64_t release_before_raw(
        self, const int32_t* rows, int64_t group, const int32_t* positions, Py_ssize_t n
    ) except -1:
        return deref(self.native).release_before(
            span[const_int32](rows, <size_t> n), group, span[const_int32](positions, <size_t> n)
        )

    cdef int shortage_raw(
        self, const int32_t* rows, const int32_t* counts, Py_ssize_t n, vector[int64_t]& out,
        const vector[int32_t]& first_blocks
    ) except -1:
        deref(self.native).shortage(
            span[const_int32](rows, <size_t> n), span[const_int32](counts, <size_t> n), out, first_blocks
        )
        return 0

    cdef int take_copies_raw(self, int64_t group, vector[BlockCopy]& out) except -1:
        out.resize(deref(self.native).settle_copies(group))  # there is room
        deref(self.native).take_copies(group, span[BlockCopy](out.data(), out.size()))
        return 0

    cdef int fail_out_of_blocks(self) except -1:
        deref(self.native).fail_out_of_blocks()

    def refuse(self):
        """Raise OutOfBlocks with the figures of the step or shortage that was counted last."""
        self.fail_out_of_blocks()

    def take_copies(self, group=None):
        """Hand over the copies that copy-on-write made necessary since the last call.

        Run them before anything is written, in the order given. A copy whose target was freed since is left out.

        Parameters
        ----------
        group : int, optional
            Of this group alone, and then not in a tuple.

        Returns
        -------
        numpy.ndarray
            int32 [n, 2], rows of (source, target); with groups, a tuple of one for each.
        """
        cdef int64_t one = -1 if group is None else as_int64(group, "group")
        cdef int64_t i
        cdef vector[void*] targets
        cdef vector[size_t] sizes
        cdef bint is_tuple = group is None and self.is_grouped
        result = PyTuple_New(len(self.pools)) if is_tuple else None
        # The arrays are made before the first group gives its copies away.
        for i in range(len(self.pools) if is_tuple else 1):
            sizes.push_back(deref(self.native).settle_copies(i if group is None else one))
            array = np.empty((sizes.back(), 2), np.int32)
            targets.push_back(address_of(array))
            if is_tuple:
                Py_INCREF(array)
                PyTuple_SET_ITEM(result, i, array)
            else:
                result = array
        for i in range(<int64_t> targets.size()):
            if deref(self.native).settle_copies(i if group is None else one) != sizes[i]:
                return self.take_copies(group)  # the garbage collector has run code that used the tables
        for i in range(<int64_t> targets.size()):
            deref(self.native).take_copies(
                i if group is None else one, span[BlockCopy](<BlockCopy*> targets[i], sizes[i])
            )
        return result

    cdef int undo_copies_raw(
        self, const int32_t* rows, Py_ssize_t num_rows, int64_t group, BlockCopy* copies, Py_ssize_t num_copies
    ) except -1:
        deref(self.native).undo_copies(
            span[const_int32](rows, <size_t> num_rows), group, span[BlockCopy](copies, <size_t> num_copies)
        )
        return 0

    def follow_changes(self):
        """Follow from now on which entries of the tables change, for a copy of them that lives elsewhere.

        The copy is one array that begins as zeros: ``table(0)`` flat, then the tables of the other groups, then
        `row_lengths`. Tables that nobody follows pay nothing for it.

        Raises
        ------
        ShapeError
            The array has more entries than int32 can name.
        """
        deref(self.native).follow_changes()

    def take_changes(self, out):
        """Hand over what has changed since the last call, each entry once, in ascending order.

        Parameters
        ----------
        out : numpy.ndarray
            int64 [n, 2], contiguous; gets rows of (index in the array, number that it holds now).

        Returns
        -------
        int
            How many rows were written. Fewer than n: there are no more.

        Raises
        ------
        UnsupportedOption
            Nobody has called `follow_changes`.
        ShapeError
            `out` is no such array.
        """
        target = writable(out, 2, "out", True)
        if target.dtype != np.int64:
            raise UnsupportedDtype(f"out is {target.dtype}; it must be int64")
        if target.shape[1] != 2 or not target.flags.c_contiguous:
            raise ShapeError(f"out has shape {target.shape}; it must be [n, 2] and contiguous")
        cdef ChangedEntry* entries = <ChangedEntry*> address_of(target)
        cdef Py_ssize_t count = self.take_changes_raw(entries, target.shape[0])
        try:
            return count
        except MemoryError:  # for the int that says how many there are
            deref(self.native).put_back_changes(span[ChangedEntry](entries, <size_t> count))
            raise

    cdef Py_ssize_t take_changes_raw(self, ChangedEntry* out, Py_ssize_t capacity) except -1:
        return <Py_ssize_t> deref(self.native).take_changes(span[ChangedEntry](out, <size_t> capacity))

    def truncate(self, rows, lengths, keep_capacity=False):
        """Cut rows to `lengths` tokens and give blocks past the last needed one back, tail first.

        Parameters
        ----------
        rows : int or array_like of int
            Distinct rows.
        lengths : int or array_like of int
            0 to the row's length; one int stands for all rows.
        keep_capacity : bool
            Keep the blocks: rejected draft tokens leave room for the next ones. If False, spare capacity goes too.

        Raises
        ------
        ShapeError
            A length is negative or longer than its row.
        InvalidSequence
            A row is not in use, or is named twice.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers kept = as_counts(lengths, which.size, "length")
        cdef bint keeps = as_flag(keep_capacity, "keep_capacity")
        deref(self.native).truncate(view(which), view(kept), keeps)

    def release_before(self, rows, group, positions):
        """Turn every whole block below a position into a hole: a window has moved past it.

        Parameters
        ----------
        rows : int or array_like of int
            Distinct rows.
        group : int
        positions : int or array_like of int
            0 to the row's length; one int stands for all rows.

        Returns
        -------
        int
            How many blocks became free.

        Raises
        ------
        ShapeError
            A position is negative or past its row, or there is no such group.
        InvalidSequence
            A row is not in use, or is named twice.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef int64_t of = as_int64(group, "group")
        cdef Integers until = as_counts(positions, which.size, "position")
        return deref(self.native).release_before(view(which), of, view(until))

    # What the tables tell.

    def length(self, row):
        """Tokens of a row."""
        return deref(self.native).length(as_row(row))

    def lengths(self, rows):
        """Tokens of each row: int32 [n], new."""
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef int32_t* data = NULL
        cdef Py_ssize_t i
        array = new_int32(which.size, &data)
        for i in range(which.size):
            data[i] = deref(self.native).length(which.data[i])
        return array

    def capacity(self, row):
        """Tokens that the blocks of a row have room for, holes counted; the least of all groups."""
        return deref(self.native).capacity(as_row(row))

    def blocks(self, row, group=0):
        """Blocks of a row: int32 [n], new; holes are 0."""
        cdef Int32s held = deref(self.native).blocks(as_row(row), as_int64(group, "group"))
        cdef int32_t* data = NULL
        array = new_int32(<Py_ssize_t> held.size(), &data)
        memcpy(data, held.data(), held.size() * sizeof(int32_t))
        return array

    def table(self, group=0):
        """The block table of a group.

        Returns
        -------
        numpy.ndarray
            int32 [max_sequences + 1, max_blocks_per_sequence], a read-only view that changes with the tables. Entries
            past the blocks of a row are 0; so is the whole last row, which padding points at.
        """
        cdef Py_ssize_t[2] shape = [deref(self.native).max_sequences() + 1, deref(self.native).max_blocks()]
        return view_of(self, <void*> deref(self.native).table(as_int64(group, "group")), 2, shape, False, True)

    @property
    def row_lengths(self):
        """Tokens of every row: int32 [max_sequences + 1], a read-only view that changes with the tables.

        Rows that are not in use are 0; so is the last row, which padding points at. Kernels that users bring take it
        beside `table`.
        """
        cdef Py_ssize_t size = deref(self.native).max_sequences() + 1
        return view_of(self, <void*> deref(self.native).lengths(), 1, &size, False, True)

    def fill(self, rows, out, lengths=None, group=0):
        """Write the block table of some rows, in their order, into buffers of the caller.

        Parameters
        ----------
        rows : int or array_like of int
            n rows; they may repeat.
        out : numpy.ndarray
            int32 [>= n, width]; each line gets a row's blocks, then zeros; lines past n become 0.
        lengths : numpy.ndarray, optional
            int32 [>= n]; gets the rows' lengths, then zeros.
        group : int

        Raises
        ------
        ShapeError
            `out` or `lengths` is too small for the rows and their tokens, strided within a line, or read-only.
        InvalidSequence
            A row is not in use.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef int64_t of = as_int64(group, "group")
        cdef DenseTable target
        table = writable(out, 2, "out", False)
        target.num_lengths = 0
        target.lengths = NULL
        if lengths is not None:
            lengths = writable(lengths, 1, "lengths", False)
            if lengths.size < which.size:
                raise ShapeError(f"lengths has room for {lengths.size} of {which.size} rows; make it longer")
            target.lengths = <int32_t*> address_of(lengths)
            target.num_lengths = lengths.size
        target.blocks = <int32_t*> <size_t> table.__array_interface__["data"][0]
        target.num_rows, target.width = table.shape
        target.stride = table.strides[0] // 4
        deref(self.native).fill(view(which), of, target)

    @property
    def num_rows(self):
        """Rows in use."""
        return deref(self.native).num_rows()

    @property
    def max_sequences(self):
        """Rows in all; also the index of the null row in `table`."""
        return deref(self.native).max_sequences()

    @property
    def max_blocks_per_sequence(self):
        """Blocks that a row can have in each group."""
        return deref(self.native).max_blocks()

    @property
    def num_groups(self):
        """Groups of layers."""
        return deref(self.native).num_groups()

    @property
    def num_pending_copies(self):
        """Copies that wait for `take_copies`, those that it will leave out included."""
        return deref(self.native).num_pending_copies()

    @property
    def nbytes(self):
        """Bytes of the native structure; they are taken from the system as rows are first used."""
        return deref(self.native).nbytes()

    def check_invariants(self, exclusive=False):
        """Recount everything; raise PagecoreError where the tables contradict themselves or their pools.

        Parameters
        ----------
        exclusive : bool
            Nobody else holds blocks of the pools, so that every reference must be one of these tables.
        """
        deref(self.native).check_invariants(bool(exclusive))

    def __repr__(self):
        return f"BlockTables(block_sizes={self.block_sizes}): {self.num_rows} of {self.max_sequences} rows in use"


cdef bint as_flag(object value, str what) except -1:
    if value is not True and value is not False:
        raise UnsupportedOption(f"{what} is {type(value).__name__}; use True or False")
    return value


def as_tuple(values, what):
    try:
        return tuple(values)
    except TypeError:
        raise ShapeError(f"{what} is {type(values).__name__}; give a sequence with one entry for each group") from None
