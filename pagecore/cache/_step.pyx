"""One forward pass's way through the index: load, take, then commit or abandon."""

cimport cython
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy

from pagecore.cache._lock cimport Held
from pagecore.cache._sequence cimport Sequence, require_each
from pagecore.cache._state cimport CacheState
from pagecore.index._block_tables cimport BlockCopy, StepBuffers
from pagecore.index._integers cimport Integers, as_int64, as_integers, new_int32
from pagecore.ops._plan cimport AttentionPlan

from pagecore.errors import InvalidSequence, ShapeError


cdef class Step:
    """The sequences of one forward pass and how many tokens each brings.

    States: idle -> loaded (load) -> in flight (take) -> idle (commit or abandon).

    `load`, `take` and `undo` are called under the lock of the cache; `commit`, `abandon` and `run` take it.
    """

    def __cinit__(self, CacheState state not None, StepBuffers buffers not None):
        cdef size_t size = <size_t>max(1, buffers.max_sequences)
        cdef size_t group, num_groups = <size_t>buffers.num_groups
        self.state = state
        self.buffers = buffers
        self.sequences = []
        self.rows.resize(size)
        self.counts.resize(size)
        self.accepted.resize(size)
        self.live_rows.resize(size)
        self.lengths.resize(size)
        self.positions.resize(size)
        self.first_blocks.reserve(num_groups)
        self.missing.resize(num_groups)
        self.copies.resize(num_groups)
        for group in range(num_groups):
            self.copies[group].reserve(size)  # a row copies one block of a group at most

    # -- load ----------------------------------------------------------------------------------------------------

    def load(self, sequences, counts, bint is_arrival=False):
        """Check and take the sequences of a step, and how many tokens each brings (an int for all, or one each).

        An arrival is a step of one sequence whose tokens were computed elsewhere.
        """
        cdef list given = list(sequences)
        cdef list checked
        cdef int32_t i
        if self.in_flight:
            raise InvalidSequence("the batch holds a step in flight; commit or abandon it before preparing another")
        if len(given) > self.buffers.max_sequences:
            raise ShapeError(f"{len(given)} sequences are given; the batch has room for {self.buffers.max_sequences}")
        self.count = <int32_t>len(given)
        self._take_counts(counts)
        checked = require_each(self.state, given, True)
        if self.in_flight or self.count != len(checked):
            raise InvalidSequence("a count prepared the same batch while it was converted; give plain integers")
        for i in range(self.count):
            self.rows[i] = (<Sequence>checked[i]).row
        self.sequences = checked
        self.is_arrival = is_arrival
        self.first_blocks.clear()
        if is_arrival:
            self.state.list_first_visible(
                <int64_t>(<Sequence>checked[0]).computed + self.counts[0], self.first_blocks
            )
        for i in range(<int32_t>self.copies.size()):
            self.copies[i].clear()

    cdef int _take_counts(self, object counts) except -1:
        cdef Integers given
        cdef int64_t total = 0
        cdef int32_t i
        if type(counts) is list or type(counts) is tuple:
            # One by one: for the few numbers of a step that is quicker than an array.
            self._check_size(len(counts))
            for i in range(self.count):
                self.counts[i] = self._checked(as_int64(counts[i], "count"))
        else:
            given = as_integers(counts, "count", ShapeError)
            if not given.is_scalar:
                self._check_size(given.size)
            for i in range(self.count):
                self.counts[i] = self._checked(given.data[0] if given.is_scalar else given.data[i])
        for i in range(self.count):
            total += self.counts[i]
        if total > self.buffers.max_tokens:
            raise ShapeError(f"the step has {total} tokens; the batch has room for {self.buffers.max_tokens}")
        return 0

    cdef int _check_size(self, Py_ssize_t size) except -1:
        if size != self.count:
            raise ShapeError(f"{size} counts are given for {self.count} sequences; give one for each")
        return 0

    cdef int32_t _checked(self, int64_t count) except -1:
        if not 0 <= count <= INT32_MAX:
            raise ShapeError(f"a count is {count}; counts are 0 to {INT32_MAX}")
        return <int32_t>count

    # -- take ----------------------------------------------------------------------------------------------------

    def take(self, list plans not None, copy):
        """Take the blocks of the loaded step, fill its buffers and plan; False, with nothing changed, if any lack.

        Parameters
        ----------
        plans : list of AttentionPlan
            Planned anew for the step.
        copy : callable
            Called with the copies on write of each group, and the blocks of each group to be zeroed before, where there
            are any; always for a batch on a device, whose bytes it sends. Where it fails the step is undone; cached
            blocks that were evicted stay evicted.
        """
        cdef list writers = self._writers()
        if self.state.prefix is not None and writers:
            self.state.prefix.reserve_moves(len(writers))
        if self.state.tenants is not None:
            self.state.tenants.note_held(self.sequences, self.held)
        if not self._try_take(writers):
            return False
        # `writers` is empty if their truncated blocks had to be given up to make room; otherwise that comes last, so
        # that a step which is undone leaves the prefix cache as it was.
        self._begin()
        try:
            if self.state.tenants is not None:
                self.state.tenants.list_stale(self.sequences, self.held, self.copies, self.stale)
            if self.staged is not None or self.has_uncopied or self._has_stale():
                copy(self.copied(), self._pair_arrays(self.stale))
            if self.state.tenants is not None:
                self.state.tenants.settle(self.sequences, self.stale)
            if self.staged is None:
                for plan in plans:
                    self.replan(plan)
        except BaseException:
            self.undo()
            raise
        for writer in writers:
            self.state.prefix.give_up_truncated(<Sequence>writer)
        self.has_uncopied = False
        return True

    cdef list _writers(self):
        """List the sequences with new tokens that were truncated inside a block which they share with the tree."""
        cdef list writers = []
        cdef int32_t i
        if self.state.prefix is not None and self.state.prefix.num_cut:
            for i in range(self.count):
                if self.counts[i] > 0 and (<Sequence>self.sequences[i]).is_cut:
                    writers.append(self.sequences[i])
        return writers

    cdef bint _try_take(self, list writers) except -1:
        cdef const int32_t* rows = self.rows.data()
        cdef const int32_t* counts = self.counts.data()
        cdef size_t group
        if self.state.tables.try_prepare_raw(rows, counts, self.count, self.buffers, self.first_blocks):
            return True
        if self.state.prefix is None:
            return False
        self.state.tables.shortage_raw(rows, counts, self.count, self.missing, self.first_blocks)
        self.state.prefix.subtract_evictable(self.missing, writers, self.first_blocks)
        for group in range(self.missing.size()):
            if self.missing[group] > 0:
                return False
        # There is enough: from here on nothing fails.
        for writer in writers:
            self.state.prefix.give_up_truncated(<Sequence>writer)
        del writers[:]
        while not self.state.tables.try_prepare_raw(rows, counts, self.count, self.buffers, self.first_blocks):
            self.state.tables.shortage_raw(rows, counts, self.count, self.missing, self.first_blocks)
            if self.state.prefix.free_blocks(self.missing) == 0:
                return False
        return True

    cdef int _begin(self) except -1:
        cdef size_t group
        cdef int32_t i
        cdef Sequence sequence
        self.in_flight = True
        self.has_uncopied = False
        for i in range(self.count):
            sequence = <Sequence>self.sequences[i]
            sequence.pending = self.counts[i]
            sequence.flight = self
            sequence.place = i
        for group in range(self.copies.size()):
            self.state.tables.take_copies_raw(<int64_t>group, self.copies[group])
            self.has_uncopied = self.has_uncopied or self.copies[group].size() > 0
            self.state.num_copied_blocks += <int64_t>self.copies[group].size()
        self._fill_token_ids()
        return 0

    cdef void _fill_token_ids(self) noexcept:
        """Write the ids of the step's tokens; -1 for those that are not known yet."""
        cdef int32_t* out = self.buffers.token_ids_data
        cdef int32_t i, k, known
        cdef Sequence sequence
        for i in range(self.count):
            sequence = <Sequence>self.sequences[i]
            known = max(0, min(self.counts[i], sequence.known - sequence.computed))
            if known > 0:
                memcpy(out, sequence.ids + sequence.computed, known * sizeof(int32_t))
            for k in range(known, self.counts[i]):
                out[k] = -1
            out += self.counts[i]

    def copied(self):
        """Return the step's copies on write of each group, in the order in which they must run: int32 [n, 2] each."""
        return tuple(self._pair_arrays(self.copies))

    cdef list _pair_arrays(self, const vector[vector[BlockCopy]]& pairs):
        cdef int32_t* data = NULL
        cdef size_t group, size
        arrays = []
        for group in range(pairs.size()):
            size = pairs[group].size()
            array = new_int32(<Py_ssize_t>(2 * size), &data)
            if size > 0:
                memcpy(data, pairs[group].data(), size * sizeof(BlockCopy))
            arrays.append(array.reshape(-1, 2))
        return arrays

    cdef bint _has_stale(self) noexcept:
        cdef size_t group
        for group in range(self.stale.size()):
            if self.stale[group].size() > 0:
                return True
        return False

    def replan(self, AttentionPlan plan):
        """Plan the attention of one group for the prepared step; padding rows have no queries."""
        cdef int32_t rows = self.buffers.max_sequences
        plan.replan(self.buffers.cu_query_lens_data, self.buffers.seq_lens_data, rows)

    def undo(self):
        """Undo `take`, copies on write included; does nothing where nothing is in flight."""
        if not self.in_flight:
            return
        self.has_uncopied = True
        self._undo()
        if self.staged is not None:
            try:
                self.staged.send_slots()  # padding by now
            except Exception:  # the device has failed before, which is why the step is undone
                pass

    # -- use -----------------------------------------------------------------------------------------------------

    def run(self, call, *args):
        """Call `call(*args)` while the step is in flight; it cannot end, or lose a sequence, before the call has.

        Raises
        ------
        InvalidSequence
            The step is not in flight: its blocks may belong to others.
        """
        cdef size_t thread = <size_t>PyThread_get_thread_ident()
        _guard = Held(self.state.lock)
        if not self.in_flight:
            raise InvalidSequence(
                "the batch holds no step in flight, so that its blocks may belong to other sequences; write and "
                "attend between prepare and commit or abandon"
            )
        if self.is_device_stale:
            self.staged.send_slots()
            self.is_device_stale = False
        self.users.push_back(thread)
        _guard = None
        try:
            return call(*args)
        finally:
            self._leave(thread)

    cdef void _leave(self, size_t thread) noexcept:
        cdef size_t i = 0
        while self.users[i] != thread:
            i += 1
        self.users[i] = self.users.back()
        self.users.pop_back()
        self.state.lock.notify()

    def require_computed_here(self):
        """Raise InvalidSequence where the step is an arrival: its queries would see the holes of its windows."""
        if self.is_arrival:
            raise InvalidSequence(
                "the batch holds an arrival, whose tokens were computed elsewhere; commit it, and attend with the next "
                "prepare"
            )

    def is_used_elsewhere(self):
        """Return True if another thread writes or attends with the step now.

        Raises
        ------
        InvalidSequence
            This thread does.
        """
        cdef size_t thread = <size_t>PyThread_get_thread_ident()
        cdef size_t user
        for user in self.users:
            if user == thread:
                raise InvalidSequence("a step ends, or loses a sequence, after write and attend, not within them")
        return self.users.size() > 0

    # -- end -----------------------------------------------------------------------------------------------------

    def commit(self, accepted=None):
        """Advance lengths by what was accepted, forget the rest, publish full blocks, release passed windows."""
        cdef object given = None if accepted is None else as_integers(accepted, "accepted count", ShapeError)
        cdef Py_ssize_t live
        _guard = Held(self.state.lock)
        self.state.begin()
        self._require_in_flight("committed")
        self.state.wait_for(self)
        self._require_in_flight("committed")
        self._read_accepted(given)
        if self.state.prefix is not None:
            self.state.prefix.name_spaces(self._live())
        # From here on nothing fails.
        live = self._list_live(True)
        if given is not None:
            self.state.tables.truncate_raw(self.live_rows.data(), self.lengths.data(), live, True)
        if self.is_arrival:  # blocks that the window has left were not written to the end: they are not published
            self._release_windows(live)
        self._end(True)
        if not self.is_arrival:
            self._release_windows(live)

    cdef int _release_windows(self, Py_ssize_t live) except -1:
        """Release the blocks of each listed row that its next token does not see; `lengths` has their lengths."""
        cdef size_t i, k
        for i in range(self.state.windows.size()):
            for k in range(<size_t>live):
                self.positions[k] = <int32_t>max(0, self.lengths[k] - (self.state.windows[i] - 1))
            self.state.tables.release_before_raw(
                self.live_rows.data(), self.state.window_groups[i], self.positions.data(), live
            )
        return 0

    def abandon(self):
        """Give back what `take` took; spare capacity of the sequences goes too, and slots become padding."""
        _guard = Held(self.state.lock)
        self.state.begin()
        self._require_in_flight("abandoned")
        self.state.wait_for(self)
        self._require_in_flight("abandoned")
        self._check_reachable()
        self._skip_on_device(0, self.buffers.num_tokens)
        self._undo()

    def give_up(self):
        """Abandon a step whose batch was collected; a device that cannot be reached keeps its slots."""
        if not self.in_flight:
            return
        self._undo()
        if self.staged is not None:
            try:
                self.staged.check_reachable()
                self.staged.send_slots()
            except Exception:  # a stream that is captured or broken takes nothing; the batch is out of use anyway
                pass

    cdef int _require_in_flight(self, str verb) except -1:
        if not self.in_flight:
            raise InvalidSequence(f"the batch holds no step in flight; it can be {verb} once after each prepare")
        return 0

    cdef int _read_accepted(self, object accepted) except -1:
        cdef Integers given = accepted
        cdef int32_t i, kept
        if given is not None and not given.is_scalar and given.size != self.count:
            raise ShapeError(f"accepted has {given.size} counts; give one for each of the {self.count} sequences")
        for i in range(self.count):
            kept = self.counts[i] if given is None else given.data[0 if given.is_scalar else i]
            if not 0 <= kept <= self.counts[i]:
                raise ShapeError(
                    f"accepted[{i}] is {kept}; the step brought {self.counts[i]} tokens of that sequence: give 0 to "
                    f"{self.counts[i]}"
                )
            if self.is_arrival and kept < self.counts[i]:
                raise ShapeError(
                    f"accepted[{i}] is {kept} of the {self.counts[i]} tokens that arrived; an arrival has only the "
                    "blocks that the token after all of them sees: commit it whole, or abandon it"
                )
            self.accepted[i] = kept
        return 0

    cdef bint _is_live(self, int32_t place) noexcept:
        return (<Sequence>self.sequences[place]).flight is self

    cdef list _live(self):
        live = []
        for each in self.sequences:
            if (<Sequence>each).flight is self:
                live.append(each)
        return live

    cdef Py_ssize_t _list_live(self, bint is_kept) noexcept:
        """Write the rows of the sequences that are still there, and their lengths after the step; returns how many."""
        cdef Py_ssize_t live = 0
        cdef int32_t i
        for i in range(self.count):
            if self._is_live(i):
                self.live_rows[live] = (<Sequence>self.sequences[i]).row
                self.lengths[live] = (<Sequence>self.sequences[i]).computed + (self.accepted[i] if is_kept else 0)
                live += 1
        return live

    cdef void _end(self, bint is_kept) noexcept:
        """End the flight of each sequence that is still there; rejected ids, and all after them, are forgotten."""
        cdef int32_t i
        cdef Sequence sequence
        for i in range(self.count):
            if not self._is_live(i):
                continue
            sequence = <Sequence>self.sequences[i]
            sequence.pending = -1
            sequence.flight = None
            if is_kept:
                sequence.computed += self.accepted[i]
                if self.accepted[i] < self.counts[i]:
                    sequence.known = min(sequence.known, sequence.computed)
                if self.state.prefix is not None:
                    self.state.prefix.publish_one(sequence, False)
        self.in_flight = self.is_lost = self.is_device_stale = False

    cdef int _undo(self) except -1:
        cdef Py_ssize_t live
        if self.has_uncopied:
            self._undo_copies()
        live = self._list_live(False)
        self.state.tables.truncate_raw(self.live_rows.data(), self.lengths.data(), live, False)
        self.buffers.native.skip_slots(0, self.buffers.num_tokens)
        self._end(False)
        return 0

    cdef int _undo_copies(self) except -1:
        """Have the rows hold again what they held before copy-on-write, which has not run."""
        cdef size_t group
        for group in range(self.copies.size()):
            if self.copies[group].size() > 0:
                self.state.tables.undo_copies_raw(
                    self.rows.data(), self.count, <int64_t>group, self.copies[group].data(),
                    <Py_ssize_t>self.copies[group].size()
                )
                self.state.num_copied_blocks -= <int64_t>self.copies[group].size()
                self.copies[group].clear()
        self.has_uncopied = False
        return 0

    # -- on a device ---------------------------------------------------------------------------------------------

    cdef int _check_reachable(self) except -1:
        """DeviceError where what is undone now would be undone in a graph."""
        if self.staged is not None:
            self.staged.check_reachable()
        return 0

    cdef int _skip_on_device(self, int32_t first, int32_t last) except -1:
        """Make padding of the slots of tokens [first, last) on the device; the host's follow once that is done."""
        if self.staged is not None:
            self.is_device_stale = True
            self.staged.send_slots(first, last)
        return 0

    cdef int32_t first_token(self, int32_t place) noexcept:
        cdef int32_t i, total = 0
        for i in range(place):
            total += self.counts[i]
        return total

    cdef int skip_on_device(self, Sequence sequence) except -1:
        cdef int32_t first = self.first_token(sequence.place)
        self._check_reachable()
        return self._skip_on_device(first, first + self.counts[sequence.place])

    cdef void skip(self, Sequence sequence) noexcept:
        cdef int32_t first = self.first_token(sequence.place)
        self.buffers.native.skip_slots(first, first + self.counts[sequence.place])
        self.is_device_stale = False


def take_step(CacheState state not None, ready, refusal):
    """Take a step under the lock of the cache; returns its batch, or None where blocks are short.

    Parameters
    ----------
    ready : callable
        Returns the batch, its step, the sequences, counts, whether the step is an arrival, plans and the `copy` of
        `Step.take`; or None where blocks are short.
    refusal : callable or None
        Returns the error to raise instead of None.
    """
    _guard = Held(state.lock)
    state.begin()
    made = ready()
    if made is not None:
        batch, step, sequences, counts, is_arrival, plans, copy = made
        (<Step>step).load(sequences, counts, is_arrival)
        if (<Step>step).take(plans, copy):
            return batch
    if refusal is not None:
        raise refusal()
    return None


@cython.no_gc  # else its step could be gone by the time it is collected
cdef class BatchTicket:
    """A batch's reference to its step: once it is collected, the cache abandons a step that is still in flight."""

    def __cinit__(self, Step step not None):
        self.step = step

    def __dealloc__(self):
        if self.step is not None and self.step.in_flight:
            self.step.is_lost = True
            self.step.state.num_lost += 1
