"""State tables: the slots that hold the recurrent state of each sequence."""

from cython.operator cimport dereference as deref
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy, memset
from libcpp.memory cimport shared_ptr
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.index._block_pool cimport BlockPool, NativeBlockPool
from pagecore.index._block_tables cimport BlockCopy, BlockTables
from pagecore.index._block_tables_core cimport view
from pagecore.index._block_tables_native cimport Int32s
from pagecore.index._integers cimport (
    Integers,
    address_of,
    as_counts,
    as_int64,
    as_integers,
    as_row,
    new_int32,
)
from pagecore.index._state_buffers cimport StateBuffers
from pagecore.index._step_buffers cimport StepBuffers

import math

from pagecore.errors import InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption


cdef class StateTable:
    """StateTable(tables, num_slots, *, chunk=64, interval=256, in_place=True, draft_tokens=0, num_checkpoints=None)\n\
--\n\n\
Slots of a `StatePool` for the sequences of block tables.

    A sequence has the same row here and in the block tables, and one call changes both: change its row through the
    state table only. `prepare` takes the blocks and the slots of a step, or nothing. `commit` keeps the state after the
    accepted tokens, and a checkpoint where the step passed one: a slot that is not written any more, to which
    `truncate` and `abandon` return, and which a prefix cache can share. A call that fails changes nothing. The table
    has one writer. When it is freed, its slots become free.

    Parameters
    ----------
    tables : BlockTables
        Block tables without rows; the table follows them.
    num_slots : int
        Slots, including the null slot 0.
    chunk, interval : int
        Grid of checkpoints; see `StateSpec`. A prefill keeps one after the last whole chunk at which a block ends, and
        decoding at multiples of the interval at which a block ends.
    in_place : bool
        True: a step overwrites the state that it reads, and a state that others share is copied before. False: it reads
        one slot and writes another.
    draft_tokens : int
        Draft tokens of a speculative step. A step of up to 1 + draft_tokens tokens writes a slot for each token, and
        may be accepted in part.
    num_checkpoints : int, optional
        Slots of quantised checkpoints, including the null slot 0, such as those of a `CheckpointPool`. By default
        checkpoints have slots of running states.

    Attributes
    ----------
    tables : BlockTables
    slots : BlockPool
        References to the slots. Other holders `share` and `free` them; only the table allocates.
    checkpoints : BlockPool
        References to the slots of checkpoints; `slots` itself unless checkpoints are quantised.
    chunk, interval, draft_tokens : int

    Raises
    ------
    ShapeError
        A size is out of range, or the interval is not a multiple of the chunk.
    UnsupportedOption
        Tables with rows, or another kind of object.

    Notes
    -----
    One slot for each sequence and copies of shared states follow SGLang's hybrid cache, checkpoints in slots of their
    own vLLM's and SGLang's prefix caches for Mamba (2025).

    Examples
    --------
    >>> tables = BlockTables(BlockPool(33), block_sizes=16, max_sequences=4, max_blocks_per_sequence=16)
    >>> states = StateTable(tables, num_slots=9)
    >>> row = states.add()
    >>> step, slots = StepBuffers(4, 256), StateBuffers(4)
    >>> states.prepare([row], [100], step, slots)
    >>> slots.zeros, slots.state_read[0], slots.state_write[0]
    (array([1], dtype=int32), np.int32(1), np.int32(1))
    >>> slots.checkpoint_lengths[0], slots.checkpoint_write[0]
    (np.int32(64), np.int32(2))
    >>> states.commit([row])
    >>> states.checkpoint(row)
    (2, 64)
    """

    def __cinit__(
        self, BlockTables tables not None, num_slots, *, chunk=64, interval=256, in_place=True, draft_tokens=0,
        num_checkpoints=None
    ):
        cdef shared_ptr[NativeBlockPool] none
        if in_place is not True and in_place is not False:
            raise UnsupportedOption(f"in_place is {type(in_place).__name__}; use True or False")
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
        self.native.reset(new NativeStateTable(
            self.slots.native, self.checkpoints.native if self.is_quantised() else none, options, tables.max_sequences
        ))
        self.chunk, self.interval, self.draft_tokens = chunk, interval, draft_tokens

    # Rows.

    def add(self, prefix=None, state=0, length=None):
        """Start a sequence in the lowest unused row.

        Parameters
        ----------
        prefix, length
            As in `BlockTables.add`: blocks to share, and the number of their tokens that count as computed. A prefill
            that passes the end of a prefix longer than `length` keeps its checkpoint before that end.
        state : int
            Slot of the state after `length` tokens, which gets one more reference from the row and one as its
            checkpoint; 0 if no token counts as computed. A slot of `checkpoints`.

        Returns
        -------
        int

        Raises
        ------
        InvalidBlock, DoubleFree, ShapeError
            The slot is outside of the pool, free, or missing; or as in `BlockTables.add`.
        OutOfRows
            Every row is in use.
        """
        cdef int64_t slot = as_int64(state, "state")
        cdef object added = self.tables.add(prefix, length)
        cdef int32_t row = added
        cdef int32_t computed = self.tables.length_raw(row)
        cdef int64_t shared = self.tables.row_raw(row, 0).size() * <int64_t> self.tables.block_sizes[0]
        try:
            deref(self.native).check_state(computed, slot)
        except BaseException:
            self.tables.remove_raw(&row, 1)
            raise
        deref(self.native).add(row, computed, <int32_t> slot, <int32_t> shared)
        return added

    def fork(self, row):
        """Start a sequence that shares all blocks, the state and the checkpoint of `row`; return its row.

        Raises
        ------
        InvalidSequence
            The row is unused, or a step of it is in flight.
        OutOfRows
            Every row is in use.
        """
        cdef int32_t parent = as_row(row)
        deref(self.native).check_idle(Int32s(&parent, 1), b"forked")
        cdef object added = self.tables.fork(parent)
        deref(self.native).fork(parent, added)
        return added

    def remove(self, rows):
        """End sequences: drop the references to their blocks and slots, those of steps in flight included.

        Raises
        ------
        InvalidSequence
            A row is unused or repeated.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        deref(self.native).check_used(view(which))
        self.tables.remove_raw(which.data, which.size)
        deref(self.native).remove(view(which))

    def reorder(self, rows, parents):
        """Give ``rows[i]`` the blocks, state and checkpoint that ``parents[i]`` had before; parents may repeat.

        Raises
        ------
        InvalidSequence
            A row or parent is unused, a row is repeated, or a step of a row or parent is in flight.
        ShapeError
            The numbers of parents and rows differ.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers sources = as_integers(parents, "parent", InvalidSequence)
        deref(self.native).check_reorder(view(which), view(sources))
        self.tables.reorder_raw(which.data, sources.data, which.size)
        deref(self.native).reorder(view(which), view(sources))

    def truncate(self, rows, lengths, keep_capacity=False):
        """Truncate rows to a length at which they have a state: 0, that of their checkpoint, or their own.

        Parameters
        ----------
        rows, lengths, keep_capacity
            As in `BlockTables.truncate`. `resume_length` returns the longest possible length below another.

        Raises
        ------
        ShapeError
            A row has no state at the length.
        InvalidSequence
            A row is unused or repeated, or a step of it is in flight.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers kept = as_counts(lengths, which.size, "length")
        if keep_capacity is not True and keep_capacity is not False:
            raise UnsupportedOption(f"keep_capacity is {type(keep_capacity).__name__}; use True or False")
        deref(self.native).check_truncate(view(which), view(kept))
        self.tables.truncate_raw(which.data, kept.data, which.size, keep_capacity)
        deref(self.native).truncate(view(which), view(kept))

    def drop_checkpoints(self, rows):
        """Forget the checkpoints of rows; return the number of slots that became free.

        Raises
        ------
        InvalidSequence
            A row is unused or repeated, or a step of it is in flight.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        return deref(self.native).drop_checkpoints(view(which))

    # Steps.

    def prepare(self, rows, counts, buffers, states, keep_checkpoints=True):
        """Take the blocks and slots of a step, all or none, and fill its buffers.

        Afterwards zero ``states.zeros`` and copy ``states.copies`` in the state pool, load ``states.loads`` if
        checkpoints are quantised, and take the copies of the block tables; then run the pass. Steps of other rows may
        be in flight at the same time.

        Parameters
        ----------
        rows, counts, buffers
            As in `BlockTables.prepare`.
        states : StateBuffers
            Overwritten; unchanged if the call fails.
        keep_checkpoints : bool
            False: the step keeps no checkpoint and takes no slot for one.

        Raises
        ------
        OutOfBlocks
            Blocks or slots are short; `requested` and `available` count whichever the message names.
        ShapeError
            A count is out of range, or buffers are too small or for another number of draft tokens.
        InvalidSequence
            A row is unused or repeated, has a step in flight, or was changed through the block tables.
        """
        if not self.try_prepare(rows, counts, buffers, states, keep_checkpoints):
            if self.lacks_slots:
                deref(self.native).fail_out_of_slots()
            self.tables.fail_out_of_blocks()

    def try_prepare(self, rows, counts, buffers, states, keep_checkpoints=True):
        """Call `prepare` and return True; return False, with nothing changed, if blocks or slots are short."""
        if not isinstance(buffers, StepBuffers):
            raise UnsupportedDtype(f"expected StepBuffers, got {type(buffers).__name__}")
        if not isinstance(states, StateBuffers):
            raise UnsupportedDtype(f"expected StateBuffers, got {type(states).__name__}")
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers added = as_counts(counts, which.size, "count")
        return self._try_prepare(which, added, buffers, states, as_keeps(keep_checkpoints))

    cdef bint _try_prepare(
        self, Integers rows, Integers counts, StepBuffers buffers, StateBuffers states, bint keeps
    ) except -1:
        cdef vector[int32_t] all_blocks
        cdef bint has_blocks
        self.lacks_slots = not deref(self.native).try_reserve(
            view(rows), view(counts), self.row_lengths, deref(states.native), keeps
        )
        if self.lacks_slots:
            self.tables._check_step(view(rows), view(counts))
            return False
        try:
            has_blocks = self.tables.try_prepare_raw(rows.data, counts.data, rows.size, buffers, all_blocks)
        except BaseException:
            deref(self.native).give_back()
            raise
        if not has_blocks:
            deref(self.native).give_back()
            return False
        deref(self.native).take(view(rows), view(counts), deref(states.native))
        return True

    def shortage(self, rows, counts, keep_checkpoints=True):
        """Return the number of slots that `prepare` would lack, those of quantised checkpoints included; not blocks.

        Nothing changes.

        Raises
        ------
        ShapeError, InvalidSequence
            As in `prepare`.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers added = as_counts(counts, which.size, "count")
        cdef bint keeps = as_keeps(keep_checkpoints)
        self.tables._check_step(view(which), view(added))
        cdef int64_t lacking = deref(self.native).shortage(view(which), view(added), self.row_lengths, keeps)
        return lacking + deref(self.native).checkpoint_shortage()

    def saves(self, rows, accepted=None):
        """Return the checkpoints that `commit` will keep, to be quantised before it: rows of (slot, checkpoint).

        Parameters
        ----------
        rows, accepted
            As in `commit`.

        Returns
        -------
        numpy.ndarray
            int32 [n, 2], new; empty unless checkpoints are quantised.

        Raises
        ------
        UnsupportedOption, ShapeError, InvalidSequence
            As in `commit`.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers given = None if accepted is None else as_counts(accepted, which.size, "accepted count")
        cdef vector[BlockCopy] listed
        cdef int32_t* data = NULL
        cdef bint _is_partial
        cdef Int32s stay = self._accepted(which, given, &_is_partial)
        deref(self.native).list_saves(view(which), stay, listed)
        array = new_int32(<Py_ssize_t> (2 * listed.size()), &data)
        if listed.size() > 0:
            memcpy(data, listed.data(), listed.size() * sizeof(BlockCopy))
        return array.reshape(-1, 2)

    def commit(self, rows, accepted=None):
        """Keep the states after the accepted tokens of steps in flight, and their checkpoints.

        Parameters
        ----------
        rows : int or array_like of int
            Distinct rows, of one step or several.
        accepted : int or array_like of int, optional
            Tokens that stay, for each row; all by default. Fewer need draft slots, or 0 a table that does not work in
            place.

        Raises
        ------
        UnsupportedOption
            A row would have no state after its accepted tokens.
        ShapeError
            A count is out of range.
        InvalidSequence
            A row is unused or repeated, or has no step in flight.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers given = None if accepted is None else as_counts(accepted, which.size, "accepted count")
        cdef bint is_partial = False
        cdef Int32s stay = self._accepted(which, given, &is_partial)
        if is_partial:
            self.tables.truncate_raw(which.data, self.lengths.data(), which.size, True)
        deref(self.native).commit(view(which), stay)

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

    def abandon(self, rows):
        """End steps in flight without their tokens, whether or not the pass has run; give back their blocks and slots.

        In place the pass may have overwritten the states, so that the rows return to their checkpoints, or to 0 tokens.
        Otherwise they return to their lengths before the steps.

        Returns
        -------
        numpy.ndarray
            int32 [n], the lengths of the rows.

        Raises
        ------
        InvalidSequence
            A row is unused or repeated, or has no step in flight.
        """
        return self._end(rows, True)

    def undo(self, rows):
        """End steps in flight of which nothing has run, neither zeros nor copies nor the pass.

        The rows return to their lengths and states before the steps; otherwise as in `abandon`.
        """
        return self._end(rows, False)

    cdef object _end(self, object rows, bint has_run):
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef int32_t* data = NULL
        array = new_int32(which.size, &data)
        self.lengths.resize(which.size)
        deref(self.native).check_flight(view(which), has_run, self.lengths)
        self.tables.truncate_raw(which.data, self.lengths.data(), which.size, False)
        if has_run:
            deref(self.native).abandon(view(which))
        else:
            deref(self.native).undo(view(which))
        memcpy(data, self.lengths.data(), which.size * sizeof(int32_t))
        return array

    # Contents.

    def length(self, row):
        """Return the number of tokens that the state of a row covers; those of a step in flight are not counted."""
        return deref(self.native).length(as_row(row))

    def slot(self, row):
        """Return the slot of the state of a row; 0 if the row has none, or if its state rests in a checkpoint."""
        return deref(self.native).slot(as_row(row))

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

    def checkpoint_length(self, before, count, shared=0):
        """Return the length at which a step from `before` tokens by `count` keeps a checkpoint; 0 for none.

        Parameters
        ----------
        before, count : int
        shared : int
            Tokens of the prefix that the sequence began with.
        """
        cdef int64_t length = as_int64(before, "before")
        cdef int64_t added = as_int64(count, "count")
        cdef int64_t branch = min(max(as_int64(shared, "shared"), 0), INT32_MAX)
        if length < 0 or added < 0 or length > INT32_MAX or added > INT32_MAX - length:
            raise ShapeError(f"a step from {length} tokens by {added}; use lengths from 0 to {INT32_MAX}")
        return deref(self.native).grid_length(<int32_t> length, <int32_t> added, <int32_t> branch)

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

    # The raw interface.

    cdef void add_raw(self, int32_t row, int32_t length, int32_t state, int32_t branch) noexcept:
        deref(self.native).add(row, length, state, branch)

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

    cdef int64_t least_shortage_raw(self, Int32s rows, Int32s counts, Int32s released) except -1:
        return deref(self.native).least_shortage(rows, counts, self.row_lengths, released)

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

    def __repr__(self):
        kept = f", {self.num_checkpoints} for checkpoints" if self.is_quantised() else ""
        return f"StateTable({self.num_slots} slots{kept}): {self.slots.num_used} in use by {self.tables.num_rows} rows"


cdef bint as_keeps(object value) except -1:
    if value is not True and value is not False:
        raise UnsupportedOption(f"keep_checkpoints is {type(value).__name__}; use True or False")
    return value


cdef bint is_used(object table, int32_t row) except -1:
    try:
        table.length(row)
    except InvalidSequence:
        return False
    return True
