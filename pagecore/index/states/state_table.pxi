"""State tables: the slots that hold the recurrent state of each sequence."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagecore.index._integers cimport Integers, as_counts, as_int64, as_integers, as_row, new_int32
from pagecore.index.tables._native cimport BlockCopy, Int32s
from pagecore.index.tables._tables cimport StepBuffers, view
from pagecore.native.std cimport vector

from pagecore.errors import InvalidSequence, UnsupportedDtype, UnsupportedOption


cdef class StateTable(StateTableCore):
    """StateTable(tables, num_slots, *, chunk=64, interval=256, in_place=True, draft_tokens=0, num_checkpoints=None, \
delay=0)\n\
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
    delay : int
        Tokens that must be computed after a checkpoint before a prefix cache can take it, because that has blocks of
        older tokens only. Prefills then keep their checkpoints that much before their ends, and decode steps at
        multiples that are further apart.

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
        cdef int64_t shared = computed
        if self.tables.pools:
            shared = self.tables.row_raw(row, 0).size() * <int64_t> self.tables.block_sizes[0]
        try:
            self._check_state(computed, slot)
        except BaseException:
            self.tables.remove_raw(&row, 1)
            raise
        self._add(row, computed, <int32_t> slot, <int32_t> shared)
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
        self._check_fork(parent)
        cdef object added = self.tables.fork(parent)
        self._fork(parent, added)
        return added

    def remove(self, rows):
        """End sequences: drop the references to their blocks and slots, those of steps in flight included.

        Raises
        ------
        InvalidSequence
            A row is unused or repeated.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        self._check_used(view(which))
        self.tables.remove_raw(which.data, which.size)
        self.remove_raw(view(which))

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
        self.check_reorder_raw(view(which), view(sources))
        self.tables.reorder_raw(which.data, sources.data, which.size)
        self.reorder_raw(view(which), view(sources))

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
        self._check_truncate(view(which), view(kept))
        self.tables.truncate_raw(which.data, kept.data, which.size, keep_capacity)
        self.truncate_raw(view(which), view(kept))

    def set_ends(self, rows, ends):
        """Set the tokens up to which an equal sequence could find what each row leaves in a prefix cache.

        An equal sequence computes at least its last token, so that a state at its end is useless to it. A prefill that
        passes the end keeps its checkpoint before it, unless the grid has none after the row's length. Without a call,
        and after a row returned to 0 tokens, a row has no end. Call it before `prepare` when the length of a prompt is
        known or has changed: the last multiple of the block size before the last token.

        Parameters
        ----------
        rows : int or array_like of int
            Distinct rows.
        ends : int or array_like of int
            An end for each row, 0 or more.

        Raises
        ------
        ShapeError
            An end is out of range, or the numbers of rows and ends differ.
        InvalidSequence
            A row is unused or repeated, or a step of it is in flight.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        cdef Integers last = as_counts(ends, which.size, "end")
        cdef Py_ssize_t i
        for i in range(which.size):
            if last.data[i] < 0:
                raise ShapeError(f"end is {last.data[i]}; use 0 or more")
        self._check_ends(view(which))
        for i in range(which.size):
            self.set_end_raw(which.data[i], last.data[i])

    def drop_checkpoints(self, rows):
        """Forget the checkpoints of rows; return the number of slots that became free.

        Raises
        ------
        InvalidSequence
            A row is unused or repeated, or a step of it is in flight.
        """
        cdef Integers which = as_integers(rows, "row", InvalidSequence)
        return self._drop_checkpoints(view(which))

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
                self.refuse()
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
        self.lacks_slots = not self.try_reserve_raw(view(rows), view(counts), states, keeps)
        if self.lacks_slots:
            self.tables._check_step(view(rows), view(counts))
            return False
        try:
            has_blocks = self.tables.try_prepare_raw(rows.data, counts.data, rows.size, buffers, all_blocks)
        except BaseException:
            self.give_back_raw()
            raise
        if not has_blocks:
            self.give_back_raw()
            return False
        self.take_raw(view(rows), view(counts), states)
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
        cdef int64_t lacking = self.shortage_raw(view(which), view(added), keeps)
        return lacking + self.checkpoint_shortage_raw()

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
        self.list_saves_raw(view(which), stay, listed)
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
        self.commit_raw(view(which), stay)

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
        self.check_end_raw(view(which), has_run, data)
        self.tables.truncate_raw(which.data, data, which.size, False)
        self.end_raw(view(which), has_run)
        return array

    def __repr__(self):
        kept = f", {self.num_checkpoints} for checkpoints" if self.is_quantised() else ""
        return f"StateTable({self.num_slots} slots{kept}): {self.slots.num_used} in use by {self.tables.num_rows} rows"


cdef bint as_keeps(object value) except -1:
    if value is not True and value is not False:
        raise UnsupportedOption(f"keep_checkpoints is {type(value).__name__}; use True or False")
    return value
