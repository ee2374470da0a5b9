"""Native side of the block tables: construction, contents, and the C interface that the cache calls.

`_table_steps.TableSteps` and `_block_tables.BlockTables` add the methods that change rows. This module alone calls the
native tables, so that the native library is linked once.
"""

from cython.operator cimport dereference as deref
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagecore.index._integers cimport (
    Integers,
    address_of,
    as_int64,
    as_integers,
    as_row,
    const_int32,
    new_int32,
    writable,
)
from pagecore.index._native_view cimport view_of
from pagecore.index.pools._block_pool cimport BlockPool, NativeBlockPool
from pagecore.index.tables._native cimport BlockCopy, ChangedEntry, DenseTable, Int32s, NativeBlockTables, SlotsOut
from pagecore.native.std cimport shared_ptr, span, vector

from pagecore.errors import InvalidSequence, ShapeError, UnsupportedOption


cdef class TablesCore:
    """Base of `BlockTables`: construction, contents, and calls with converted arguments."""

    def __cinit__(self, pools, *, block_sizes=16, max_sequences, max_blocks_per_sequence):
        cdef vector[shared_ptr[NativeBlockPool]] native_pools
        cdef vector[int64_t] sizes
        self.is_grouped = not isinstance(pools, BlockPool)
        self.pools = as_tuple(pools, "pools") if self.is_grouped else (pools,)
        for pool in self.pools:
            if not isinstance(pool, BlockPool):
                raise UnsupportedOption(f"expected a BlockPool, got {type(pool).__name__}")
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

    # Contents.

    def length(self, row):
        """Return the number of tokens of a row."""
        return deref(self.native).length(as_row(row))

    def lengths(self, rows):
        """Return the number of tokens of each row: int32 [n], new."""
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef int32_t* data = NULL
        cdef Py_ssize_t i
        array = new_int32(which.size, &data)
        for i in range(which.size):
            data[i] = deref(self.native).length(which.data[i])
        return array

    def capacity(self, row):
        """Return the number of tokens that the blocks of a row, holes included, can hold; the minimum over groups."""
        return deref(self.native).capacity(as_row(row))

    def blocks(self, row, group=0):
        """Return the blocks of a row: int32 [n], new; holes are 0."""
        cdef Int32s held = deref(self.native).blocks(as_row(row), as_int64(group, "group"))
        cdef int32_t* data = NULL
        array = new_int32(<Py_ssize_t> held.size(), &data)
        memcpy(data, held.data(), held.size() * sizeof(int32_t))
        return array

    def table(self, group=0):
        """Return the block table of a group.

        Returns
        -------
        numpy.ndarray
            int32 [max_sequences + 1, max_blocks_per_sequence], a read-only view that changes with the tables. Entries
            past the blocks of a row are 0. The last row is the null row, for padding: all 0.
        """
        cdef Py_ssize_t[2] shape = [deref(self.native).max_sequences() + 1, deref(self.native).max_blocks()]
        return view_of(self, <void*> deref(self.native).table(as_int64(group, "group")), 2, shape, False, True)

    @property
    def row_lengths(self):
        """Tokens of every row: int32 [max_sequences + 1], a read-only view that changes with the tables.

        Unused rows and the null row are 0. Custom kernels take it along with `table`.
        """
        cdef Py_ssize_t size = deref(self.native).max_sequences() + 1
        return view_of(self, <void*> deref(self.native).lengths(), 1, &size, False, True)

    def fill(self, rows, out, lengths=None, group=0):
        """Write the block table of the given rows into buffers of the caller.

        Parameters
        ----------
        rows : int or array_like of int
            n rows; they may repeat.
        out : numpy.ndarray
            int32 [>= n, width]. Line i receives the blocks of rows[i], then zeros; lines past n become 0.
        lengths : numpy.ndarray, optional
            int32 [>= n]. Receives the lengths of the rows, then zeros.
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
                raise ShapeError(f"expected lengths to have at least {which.size} entries, got {lengths.size}")
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
        """Number of rows; also the index of the null row in `table`."""
        return deref(self.native).max_sequences()

    @property
    def max_blocks_per_sequence(self):
        """Most blocks that a row can have in each group."""
        return deref(self.native).max_blocks()

    @property
    def num_groups(self):
        """Groups of layers."""
        return deref(self.native).num_groups()

    @property
    def num_pending_copies(self):
        """Copies that wait for `take_copies`, including those that it will leave out."""
        return deref(self.native).num_pending_copies()

    @property
    def nbytes(self):
        """Bytes of the native structure; the system allocates them as rows are first used."""
        return deref(self.native).nbytes()

    def check_invariants(self, exclusive=False):
        """Recount everything; raise PagecoreError if the tables contradict themselves or their pools.

        Parameters
        ----------
        exclusive : bool
            If True, these tables are the only holder of blocks of their pools, so that all references are theirs.
        """
        deref(self.native).check_invariants(bool(exclusive))

    # Calls with converted arguments.

    cdef int32_t _next_row(self) noexcept:
        return deref(self.native).next_row()

    cdef int _reorder(self, Int32s rows, Int32s parents) except -1:
        deref(self.native).reorder(rows, parents)
        return 0

    cdef int64_t _check_step(self, Int32s rows, Int32s counts) except -1:
        return deref(self.native).check_step(rows, counts)

    cdef bint _try_extend(self, Int32s rows, Int32s counts, const vector[SlotsOut]& out) except -1:
        return deref(self.native).try_extend(rows, counts, out)

    cdef int64_t _settle_copies(self, int64_t group) except -1:
        return <int64_t> deref(self.native).settle_copies(group)

    cdef int _take_copies(self, int64_t group, span[BlockCopy] out) except -1:
        deref(self.native).take_copies(group, out)
        return 0

    cdef int _follow_changes(self) except -1:
        deref(self.native).follow_changes()
        return 0

    cdef void _put_back_changes(self, ChangedEntry* entries, Py_ssize_t count) noexcept:
        deref(self.native).put_back_changes(span[ChangedEntry](entries, <size_t> count))

    # The raw interface.

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

    cdef int32_t add_raw(self, const vector[span[const_int32]]& prefix, int64_t length=-1) except -1:
        return deref(self.native).add(prefix, length)

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
        self, const int32_t* rows, int64_t group, const int32_t* positions, Py_ssize_t n, int64_t first=0
    ) except -1:
        return deref(self.native).release_before(
            span[const_int32](rows, <size_t> n), group, span[const_int32](positions, <size_t> n), first
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
        out.resize(deref(self.native).settle_copies(group))  # within the capacity
        deref(self.native).take_copies(group, span[BlockCopy](out.data(), out.size()))
        return 0

    cdef bint try_compact_raw(
        self, int32_t row, int32_t unmoved, int32_t length, vector[int64_t]& missing, const vector[int32_t]& replaced
    ) except -1:
        return deref(self.native).try_compact(
            row, unmoved, length, span[int64_t](missing.data(), missing.size()),
            Int32s(replaced.data(), replaced.size())
        )

    cdef void replace_raw(self, int32_t row, int64_t group, int32_t at, int32_t block) noexcept:
        deref(self.native).replace(row, group, at, block)

    cdef int fail_out_of_blocks(self) except -1:
        deref(self.native).fail_out_of_blocks()

    cdef int undo_copies_raw(
        self, const int32_t* rows, Py_ssize_t num_rows, int64_t group, BlockCopy* copies, Py_ssize_t num_copies
    ) except -1:
        deref(self.native).undo_copies(
            span[const_int32](rows, <size_t> num_rows), group, span[BlockCopy](copies, <size_t> num_copies)
        )
        return 0

    cdef Py_ssize_t take_changes_raw(self, ChangedEntry* out, Py_ssize_t capacity) except -1:
        return <Py_ssize_t> deref(self.native).take_changes(span[ChangedEntry](out, <size_t> capacity))


cdef tuple as_tuple(object values, str name):
    try:
        return tuple(values)
    except TypeError:
        raise ShapeError(
            f"expected a sequence with one entry for each group as {name}, got {type(values).__name__}"
        ) from None
