"""Native side of the state tables: construction, contents, and the C interface that the cache calls.

`_state_table.StateTable` adds the methods that change rows. This module alone calls the native table, so that the
native library is linked once.
"""

from cython.operator cimport dereference as deref
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy, memset

from pagecore.index._integers cimport Integers, address_of, as_int64, as_row, new_int32
from pagecore.index.pools._block_pool cimport BlockPool, NativeBlockPool
from pagecore.index.states._native cimport NativeStateTable, StateOptions
from pagecore.index.tables._native cimport BlockCopy, Int32s
from pagecore.index.tables._tables cimport BlockTables, view
from pagecore.native.std cimport shared_ptr, span, vector

import math

from pagecore.errors import InvalidSequence, ShapeError, UnsupportedOption, shown


cdef class StateTableCore:
    """Base of `StateTable`: construction, contents, and calls with converted arguments."""

    def __cinit__(
        self, tables, num_slots, *, chunk=64, interval=256, in_place=True, draft_tokens=0,
        num_checkpoints=None, delay=0
    ):
        cdef shared_ptr[NativeBlockPool] none
        if in_place is not True and in_place is not False:
            raise UnsupportedOption(f"in_place is {type(in_place).__name__}; use True or False")
        if not isinstance(tables, BlockTables):
            raise UnsupportedOption(f"tables is {shown(tables)}; pass the BlockTables whose rows have states")
        if tables.num_rows:
            raise UnsupportedOption(f"the tables have {tables.num_rows} rows; make the state table before adding rows")
        self.tables = tables
        self.row_lengths = <const int32_t*> address_of(tables.row_lengths)
        self.is_in_place = in_place
        self.slots = BlockPool(num_slots)
        self.checkpoints = self.slots if num_checkpoints is None else BlockPool(num_checkpoints)
        cdef StateOptions options
        options.chunk = as_int64(chunk, "chunk")
        options.interval = as_int64(interval, "interval")
        options.block_size = as_int64(math.lcm(*tables.block_sizes), "block_size")
        options.draft_tokens = as_int64(draft_tokens, "draft_tokens")
        options.in_place = self.is_in_place
        options.delay = as_int64(delay, "delay")
        self.native.reset(new NativeStateTable(
            self.slots.native, self.checkpoints.native if self.is_quantised() else none, options, tables.max_sequences
        ))
        self.chunk, self.interval, self.draft_tokens = chunk, interval, draft_tokens

    # Contents.

    def length(self, row):
        """Return the number of tokens that the state of a row covers; those of a step in flight are not counted."""
        return deref(self.native).length(as_row(row))

    def slot(self, row):
        """Return the slot of the state of a row; 0 if the row has none, or if its state rests in a checkpoint."""
        return deref(self.native).slot(as_row(row))

    def spare(self, row):
        """Return the slot that the next step of a row writes instead of one of the pool; 0 for none."""
        return deref(self.native).spare(as_row(row))

    def resting(self, row):
        """Return the slot of the quantised checkpoint from which the next step of a row begins; 0 for none."""
        return deref(self.native).resting(as_row(row))

    def checkpoint(self, row):
        """Return the slot of a row's checkpoint and the number of tokens that it covers, or None."""
        cdef int32_t slot = deref(self.native).checkpoint(as_row(row))
        return (slot, deref(self.native).checkpoint_length(as_row(row))) if slot else None

    def resume_length(self, row, length):
        """Return the longest length, up to `length`, to which `truncate` can cut a row."""
        cdef int64_t most = as_int64(length, "length")
        if most < 0:
            raise ShapeError(f"length is {most}; use 0 or more")
        return deref(self.native).resume_length(as_row(row), <int32_t> min(most, INT32_MAX))

    def checkpoint_length(self, before, count, shared=0, end=None):
        """Return the length at which a step from `before` tokens by `count` keeps a checkpoint; 0 for none.

        Parameters
        ----------
        before, count : int
        shared : int
            Tokens of the prefix that the sequence began with.
        end : int, optional
            As `StateTable.set_ends` sets it.
        """
        cdef int64_t last = INT32_MAX if end is None else as_int64(end, "end")
        cdef int64_t length = as_int64(before, "before")
        cdef int64_t added = as_int64(count, "count")
        cdef int64_t branch = min(max(as_int64(shared, "shared"), 0), INT32_MAX)
        if length < 0 or added < 0 or length > INT32_MAX or added > INT32_MAX - length:
            raise ShapeError(f"a step from {length} tokens by {added}; use lengths from 0 to {INT32_MAX}")
        if last < 0:
            raise ShapeError(f"end is {last}; use 0 or more")
        return deref(self.native).grid_length(
            <int32_t> length, <int32_t> added, <int32_t> branch, <int32_t> min(last, INT32_MAX)
        )

    @property
    def in_place(self):
        """True if a step overwrites the state that it reads."""
        return self.is_in_place

    @property
    def max_sequences(self):
        """Number of rows."""
        return deref(self.native).max_sequences()

    @property
    def num_slots(self):
        """Slots, including the null slot."""
        return self.slots.num_blocks

    @property
    def num_checkpoints(self):
        """Slots of quantised checkpoints, including the null slot; 0 if checkpoints have slots of running states."""
        return self.checkpoints.num_blocks if self.is_quantised() else 0

    @property
    def nbytes(self):
        """Bytes of the native structure; the system allocates them as rows are first used."""
        return deref(self.native).nbytes()

    def refuse(self):
        """Raise OutOfBlocks with the figures of the last step or shortage that was counted."""
        deref(self.native).fail_out_of_slots()

    def held_counts(self):
        """Return the number of references of this table to each slot: int32 [num_slots], new."""
        return self._held()[0]

    def held_checkpoint_counts(self):
        """Return the references of this table to each slot of `checkpoints`: int32 [num_checkpoints], new."""
        return self._held()[1]

    cdef tuple _held(self):
        cdef int32_t* data = NULL
        cdef int32_t* kept = NULL
        cdef size_t size = <size_t> self.slots.num_blocks, kept_size = <size_t> self.checkpoints.num_blocks
        array = new_int32(<Py_ssize_t> size, &data)
        others = new_int32(<Py_ssize_t> kept_size, &kept)
        memset(data, 0, size * sizeof(int32_t))
        memset(kept, 0, kept_size * sizeof(int32_t))
        deref(self.native).count_held(span[int32_t](data, size), span[int32_t](kept, kept_size))
        return array, others if self.is_quantised() else array

    def check_invariants(self, exclusive=False):
        """Recount every slot; raise PagecoreError if the table contradicts itself, its pool or the block tables.

        Parameters
        ----------
        exclusive : bool
            If True, this table is the only holder of slots, so that all references are its own.
        """
        cdef int32_t row
        deref(self.native).check_invariants(bool(exclusive))
        for row in range(self.tables.max_sequences):
            if is_used(self.tables, row) != is_used(self, row):
                raise InvalidSequence(
                    f"row {row} is used in the block tables or in the state table, but not in both; change rows "
                    "through the state table"
                )

    # Calls with converted arguments.

    cdef int _check_state(self, int32_t length, int64_t slot) except -1:
        deref(self.native).check_state(length, slot)
        return 0

    cdef int _add(self, int32_t row, int32_t length, int32_t state, int32_t branch) except -1:
        deref(self.native).add(row, length, state, branch)
        return 0

    cdef int _check_fork(self, int32_t row) except -1:
        deref(self.native).check_idle(Int32s(&row, 1), b"forked")
        return 0

    cdef int _check_ends(self, Int32s rows) except -1:
        deref(self.native).check_idle(rows, b"given an end")
        return 0

    cdef int _fork(self, int32_t row, int32_t child) except -1:
        deref(self.native).fork(row, child)
        return 0

    cdef int _check_used(self, Int32s rows) except -1:
        deref(self.native).check_used(rows)
        return 0

    cdef int _check_truncate(self, Int32s rows, Int32s lengths) except -1:
        deref(self.native).check_truncate(rows, lengths)
        return 0

    cdef int64_t _drop_checkpoints(self, Int32s rows) except -1:
        return deref(self.native).drop_checkpoints(rows)

    cdef Int32s _accepted(self, Integers rows, Integers given, bint* is_partial) except *:
        """Check and return the accepted tokens of steps in flight, all for None; write the lengths after them."""
        cdef Py_ssize_t i
        is_partial[0] = False
        self.lengths.resize(rows.size)
        if given is None:
            deref(self.native).check_flight(view(rows), False, self.lengths)
            self.counts.resize(rows.size)
            for i in range(rows.size):
                self.counts[i] = deref(self.native).step_count(rows.data[i])
            return Int32s(self.counts.data(), self.counts.size())
        deref(self.native).check_commit(view(rows), view(given), self.lengths)
        for i in range(rows.size):
            is_partial[0] = is_partial[0] or given.data[i] < deref(self.native).step_count(rows.data[i])
        return view(given)

    # The raw interface.

    cdef void add_raw(self, int32_t row, int32_t length, int32_t state, int32_t branch) noexcept:
        deref(self.native).add(row, length, state, branch)

    cdef void set_end_raw(self, int32_t row, int32_t end) noexcept:
        deref(self.native).set_end(row, end)

    cdef void restore_raw(
        self, int32_t row, int32_t length, int32_t running, int32_t resting, int32_t checkpoint_length,
        int32_t checkpoint
    ) noexcept:
        deref(self.native).restore(row, length, running, resting, checkpoint_length, checkpoint)

    cdef void fork_raw(self, int32_t row, int32_t child) noexcept:
        deref(self.native).fork(row, child)

    cdef void remove_raw(self, Int32s rows) noexcept:
        deref(self.native).remove(rows)

    cdef int check_reorder_raw(self, Int32s rows, Int32s parents) except -1:
        deref(self.native).check_reorder(rows, parents)
        return 0

    cdef void reorder_raw(self, Int32s rows, Int32s parents) noexcept:
        deref(self.native).reorder(rows, parents)

    cdef void truncate_raw(self, Int32s rows, Int32s lengths) noexcept:
        deref(self.native).truncate(rows, lengths)

    cdef int64_t drop_all_checkpoints_raw(self) noexcept:
        return deref(self.native).drop_all_checkpoints()

    cdef void forget_checkpoint_raw(self, int32_t row) noexcept:
        deref(self.native).forget_checkpoint(row)

    cdef bint try_reserve_raw(self, Int32s rows, Int32s counts, StateBuffers out, bint keeps) except -1:
        return deref(self.native).try_reserve(rows, counts, self.row_lengths, deref(out.native), keeps)

    cdef void take_raw(self, Int32s rows, Int32s counts, StateBuffers out) noexcept:
        deref(self.native).take(rows, counts, deref(out.native))

    cdef void give_back_raw(self) noexcept:
        deref(self.native).give_back()

    cdef int64_t shortage_raw(self, Int32s rows, Int32s counts, bint keeps) except -1:
        return deref(self.native).shortage(rows, counts, self.row_lengths, keeps)

    cdef int64_t least_shortage_raw(
        self, Int32s rows, Int32s counts, Int32s released, int64_t others
    ) except -1:
        return deref(self.native).least_shortage(rows, counts, self.row_lengths, released, others)

    cdef int check_commit_raw(self, Int32s rows, Int32s accepted) except -1:
        self.lengths.resize(rows.size())
        deref(self.native).check_commit(rows, accepted, self.lengths)
        return 0

    cdef int64_t checkpoint_shortage_raw(self) noexcept:
        return deref(self.native).checkpoint_shortage()

    cdef bint is_quantised(self) noexcept:
        return self.checkpoints is not self.slots

    cdef int list_saves_raw(self, Int32s rows, Int32s accepted, vector[BlockCopy]& out) except -1:
        deref(self.native).list_saves(rows, accepted, out)
        return 0

    cdef void select_path_raw(self, int32_t row, Int32s path, bint is_undone) noexcept:
        if is_undone:
            deref(self.native).restore_path(row, path)
        else:
            deref(self.native).select_path(row, path)

    cdef void commit_raw(self, Int32s rows, Int32s accepted) noexcept:
        deref(self.native).commit(rows, accepted)

    cdef int check_end_raw(self, Int32s rows, bint has_run, int32_t* lengths) except -1:
        self.lengths.resize(rows.size())
        deref(self.native).check_flight(rows, has_run, self.lengths)
        if rows.size() > 0:
            memcpy(lengths, self.lengths.data(), rows.size() * sizeof(int32_t))
        return 0

    cdef void end_raw(self, Int32s rows, bint has_run) noexcept:
        if has_run:
            deref(self.native).abandon(rows)
        else:
            deref(self.native).undo(rows)

    cdef int32_t slot_raw(self, int32_t row) noexcept:
        return deref(self.native).slot(row)

    cdef int32_t resting_raw(self, int32_t row) noexcept:
        return deref(self.native).resting(row)

    cdef int32_t checkpoint_raw(self, int32_t row) noexcept:
        return deref(self.native).checkpoint(row)

    cdef int32_t checkpoint_length_raw(self, int32_t row) noexcept:
        return deref(self.native).checkpoint_length(row)

    cdef int32_t resume_length_raw(self, int32_t row, int32_t length) noexcept:
        return deref(self.native).resume_length(row, length)


cdef bint is_used(object table, int32_t row) except -1:
    try:
        table.length(row)
    except InvalidSequence:
        return False
    return True
