"""The step of one forward pass: load, take, then commit or abandon."""

cimport cython
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int32_t

from pagecore.cache.sequences._sequences cimport Sequence, require
from pagecore.cache.state._state cimport CacheState, Held

from pagecore.cache.sequences._sequences import as_list
from pagecore.errors import InvalidSequence


cdef class Step(StepRecord):
    """The sequences of one forward pass and the number of tokens that each brings.

    States: idle -> loaded (load) -> in flight (take) -> idle (commit or abandon).

    `load` and `take` are called under the lock of the cache; `commit`, `abandon` and `run` take it.
    """

    def load(self, list sequences not None, counts, bint is_arrival=False, num_sealed=None):
        """Check and store the sequences of a step and their counts (an int for all, or one for each).

        An arrival is a step of one sequence whose tokens were computed elsewhere, `num_sealed` of these in sealed
        blocks.
        """
        cdef int32_t i
        if self.in_flight:
            raise InvalidSequence("the batch has a step in flight; commit or abandon it before preparing another")
        self.plan.fill(sequences, counts, is_arrival, num_sealed, self.buffers.max_sequences, self.buffers.max_tokens)
        for i in range(<int32_t>self.copies.size()):
            self.copies[i].clear()

    def take(self, list plans not None, copy):
        """Take the blocks of the loaded step, fill its buffers and plan; return False, with nothing changed, if short.

        Parameters
        ----------
        plans : list of AttentionPlan
            Planned again for the step.
        copy : callable
            Called with the copies on write of each group and the blocks of each group to be zeroed before, if there
            are any. For a batch on a device it is always called, and sends the step's bytes. If it fails, the step is
            undone; cached blocks that were evicted stay evicted.
        """
        return take(self, plans, copy)

    # -- use -----------------------------------------------------------------------------------------------------

    def run(self, call, *args):
        """Return `call(*args)`; until it returns, the step cannot end or lose a sequence.

        Raises
        ------
        InvalidSequence
            The step is not in flight: its blocks may belong to other sequences.
        """
        cdef size_t thread = <size_t>PyThread_get_thread_ident()
        _guard = Held(self.state.lock)
        if not self.in_flight:
            raise InvalidSequence(
                "the batch has no step in flight, so its blocks may belong to other sequences; write and attend "
                "between prepare and commit or abandon"
            )
        if self.is_device_stale:
            self.send_slots()
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
        """Raise InvalidSequence for an arrival: its queries would see the holes of its windows."""
        if self.plan.is_arrival:
            raise InvalidSequence(
                "the batch has an arrival, whose tokens were computed elsewhere; commit it, and attend with the next "
                "prepare"
            )

    def is_used_elsewhere(self):
        """Return True if another thread currently writes or attends with the step.

        Raises
        ------
        InvalidSequence
            The calling thread itself is within write or attend.
        """
        cdef size_t thread = <size_t>PyThread_get_thread_ident()
        cdef size_t user
        for user in self.users:
            if user == thread:
                raise InvalidSequence("a step cannot end, or lose a sequence, within write or attend; do so afterwards")
        return self.users.size() > 0

    # -- end -----------------------------------------------------------------------------------------------------

    def commit(self, accepted=None, accepted_path=None, moves=None, save=None):
        """Advance lengths by the accepted tokens, forget the rest, publish full blocks and release passed windows.

        `moves` returns a `SlotMoves` for each group; it is called if tokens of an accepted path move. `save` quantises
        the checkpoints in ``states.saves``; it is called before anything changes, if there are any.
        """
        commit(self, accepted, accepted_path, moves, save)

    def abandon(self):
        """Give back what `take` took, and the spare capacity of the sequences; slots become padding."""
        abandon(self)

    def give_up(self):
        """Abandon a step whose batch was collected; a device that cannot be reached keeps its slots."""
        give_up(self)


def take_step(CacheState state not None, ready, refusal):
    """Take a step under the lock of the cache; return its batch, or None if blocks are short.

    Parameters
    ----------
    ready : callable
        Returns the batch, its step, the arguments of `Step.load` (None for a step that was made with its plan), and
        the `plans` and `copy` of `Step.take`; or None if blocks are short.
    refusal : callable or None
        Returns the error to raise instead of returning None.
    """
    _guard = Held(state.lock)
    state.begin()
    made = ready()
    if made is not None:
        batch, step, load, plans, copy = made
        # Native from here to the return: code of the caller that ran in `ready` cannot invalidate the plan any more.
        if load is None:
            (<Step?>step).plan.recheck()
        else:
            (<Step?>step).load(*load)
        if take(<Step>step, plans, copy):
            return batch
    if refusal is not None:
        raise refusal()
    return None


def abandon_steps(CacheState state not None, sequences):
    """Abandon every step in flight that has one of `sequences`."""
    cdef list listed = as_list(sequences)
    _guard = Held(state.lock)
    state.begin()
    for sequence in listed:
        step = require(state, sequence, False).flight
        if step is None:
            raise InvalidSequence(f"sequence {sequence.id!r} has no step in flight; there is nothing to abandon")
        step.is_used_elsewhere()  # refuses a call from within write and attend, before any step ends
    for sequence in listed:
        step = (<Sequence>sequence).flight
        if step is not None:
            step.abandon()


@cython.no_gc  # otherwise its step could be gone by the time it is collected
cdef class BatchTicket:
    """A batch's reference to its step: when it is collected, the cache abandons a step that is still in flight."""

    def __cinit__(self, Step step not None):
        self.step = step

    def __dealloc__(self):
        if self.step is not None and self.step.in_flight:
            self.step.is_lost = True
            self.step.state.num_lost += 1
