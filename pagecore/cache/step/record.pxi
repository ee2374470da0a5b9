"""The record of one step: its plan, its buffers, and everything that must be undone if it fails."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagecore.cache.sequences._sequences cimport CrossContent, Sequence
from pagecore.cache.state._state cimport CacheState
from pagecore.index._integers cimport new_int32, new_int64
from pagecore.index.states._states cimport StateBuffers
from pagecore.index.tables._native cimport BlockCopy, Int32s
from pagecore.index.tables._tables cimport StepBuffers
from pagecore.native.std cimport vector

from pagecore.errors import InvalidSequence


cdef class StepRecord:
    """The data of a step, which `take`, `commit` and `abandon` change.

    Parameters
    ----------
    state : CacheState
    buffers : StepBuffers
    plan : StepPlan, optional
        The plan of the first step; an empty plan by default.
    """

    def __cinit__(self, CacheState state not None, StepBuffers buffers not None, StepPlan plan=None):
        cdef size_t size = <size_t>max(1, buffers.max_sequences)
        cdef size_t group, num_groups = <size_t>buffers.num_groups
        self.state = state
        self.buffers = buffers
        self.plan = StepPlan(state) if plan is None else plan
        self.plan.reserve(size)
        self.accepted.resize(size)
        self.live_rows.resize(size)
        self.lengths.resize(size)
        self.positions.resize(size)
        if state.states is not None:
            self.states = StateBuffers(buffers.max_sequences, state.states.draft_tokens)
        if state.seals is not None:
            self.sealed_to.resize(size)
        self.copies.resize(num_groups)
        for group in range(num_groups):
            self.copies[group].reserve(size)  # a row copies at most one block of a group

    def copied(self):
        """Return the copies on write of each group, in the order in which they must run: a tuple of int32 [n, 2]."""
        cdef size_t group
        arrays = self.pair_arrays(self.copies)
        for group in range(self.copies.size()):
            if not self.copies_bytes(group):
                arrays[group] = arrays[group][:0]
        return tuple(arrays)

    cdef bint copies_bytes(self, size_t group) noexcept:
        cdef CacheState state = self.state
        return state.tenants is not None or state.seals is None or not state.seals.has_sealed(<int32_t>group)

    def moved_slots(self):
        """Return the slots of each group that the last commit moved, in order: a tuple of int64 [n, 2]."""
        cdef int64_t* data = NULL
        cdef size_t group, size
        arrays = []
        for group in range(self.copies.size()):
            size = self.moved[group].size() if group < self.moved.size() else 0
            array = new_int64(<Py_ssize_t>size, &data)
            if size > 0:
                memcpy(data, self.moved[group].data(), size * sizeof(int64_t))
            arrays.append(array.reshape(-1, 2))
        return tuple(arrays)

    @property
    def has_tree(self):
        """True if the last step has trees."""
        return self.tree is not None

    cdef list pair_arrays(self, const vector[vector[BlockCopy]]& pairs):
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

    cdef bint has_stale(self) noexcept:
        cdef size_t group
        for group in range(self.stale.size()):
            if self.stale[group].size() > 0:
                return True
        return False

    cdef bint has_state_moves(self) noexcept:
        if self.states is None:
            return False
        return self.states.native.num_zeros() + self.states.native.num_copies() + self.states.native.num_loads() > 0

    cdef Int32s live_span(self, Py_ssize_t live) noexcept:
        return Int32s(self.live_rows.data(), <size_t>live)

    cdef bint writes_cross(self) noexcept:
        return self.cross is not None and len(self.cross.written) > 0

    # -- sequences -----------------------------------------------------------------------------------------------

    cdef int require_in_flight(self, str verb) except -1:
        if not self.in_flight:
            raise InvalidSequence(
                f"the batch has no step in flight; it can be {verb} once after each prepare"
            )
        return 0

    cdef bint is_live(self, int32_t index) noexcept:
        return (<Sequence>self.plan.sequences[index]).flight is self

    cdef list live(self):
        live = []
        for each in self.plan.sequences:
            if (<Sequence>each).flight is self:
                live.append(each)
        return live

    cdef Py_ssize_t list_live(self, bint is_kept) noexcept:
        cdef Py_ssize_t live = 0
        cdef int32_t i
        cdef Sequence sequence
        for i in range(self.plan.num_sequences):
            if self.is_live(i):
                sequence = <Sequence>self.plan.sequences[i]
                self.live_rows[live] = sequence.row
                self.lengths[live] = sequence.computed + (self.accepted[i] if is_kept else 0)
                live += 1
        return live

    cdef int32_t first_token(self, int32_t index) noexcept:
        cdef int32_t i, total = 0
        for i in range(index):
            total += self.plan.counts[i]
        return total

    # -- on a device ---------------------------------------------------------------------------------------------

    cdef int check_reachable(self) except -1:
        if self.staged is not None:
            self.staged.check_reachable()
        return 0

    cdef int send_slots(self) except -1:
        self.staged.send_slots()
        if self.cross is not None:
            self.cross.staged.send_slots()
        return 0

    cdef int skip_on_device(self, int32_t first, int32_t last) except -1:
        if self.staged is not None:
            self.is_device_stale = True
            self.staged.send_slots((self.first_token(first), self.first_token(last)), (first, last))
            self.staged.join_stream()  # steps on another stream that take the blocks follow the pass
        return 0

    cdef int skip_sequence_on_device(self, Sequence sequence) except -1:
        self.check_reachable()
        return self.skip_on_device(sequence.step_index, sequence.step_index + 1)

    cdef void skip_sequence(self, Sequence sequence) noexcept:
        cdef int32_t first = self.first_token(sequence.step_index)
        self.buffers.native.skip_slots(first, first + self.plan.counts[sequence.step_index])
        if self.states is not None:
            self.states.native.skip(sequence.step_index, sequence.step_index + 1)
        self.is_device_stale = False

    cdef int skip_content_on_device(self, CrossContent content) except -1:
        self.check_reachable()
        if self.staged is not None:
            self.is_device_stale = True
        return self.cross.skip_on_device(content)

    cdef void skip_content(self, CrossContent content) noexcept:
        self.cross.skip(content)
        self.is_device_stale = False
