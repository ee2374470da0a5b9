"""The queue of a scheduler: the runs that wait, and the cached prefixes that they hold; R1 and R2 of `roster.py`."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from operator import attrgetter
from typing import TYPE_CHECKING

from pagecore.serving.scheduling.crossing import add_options
from pagecore.serving.scheduling.journal import Journal

if TYPE_CHECKING:
    from pagecore.cache import PagedKVCache, Sequence
    from pagecore.serving.scheduling.request import Run

__all__ = ["WaitingRuns"]


class WaitingRuns:
    """The runs that wait; the base of `Roster`.

    Attributes
    ----------
    waiting : OrderedDict of Run
        The queue: preempted runs, then the others, oldest first; the values are None.
    by_priority : list of Run or None
        The queue sorted by `Run.rank` under the policy "priority"; None under other policies.
    pinned : dict of Run
        The waiting runs that hold their cached prefix: between two steps the next run to admit or none.
    delays : dict of Run to int
        The runs that wait for equal prompts of the newest step, and the `shared_at` of each before.
    continuing : dict of Run
        The runs in the queue that have come back for another turn and were not preempted in it. They may hold what they
        have computed, in the cache or in the swap space.
    new : dict of Run
        The runs in the queue that were never admitted.
    num_steps : int
        Number of steps so far.
    num_waiting_tokens : int
        Sum of `Run.num_tokens_left` over the queue.
    news : int
        Number of changes after which the next run may find a longer cached prefix, or more memory.
    """

    def __init__(self, cache: PagedKVCache, policy: str) -> None:
        self.cache = cache
        self._sequences = cache.sequences
        self.waiting: OrderedDict[Run, None] = OrderedDict()
        self.by_priority: list[Run] | None = [] if policy == "priority" else None
        self.pinned: dict[Run, None] = {}
        self.delays: dict[Run, int] = {}
        self.continuing: dict[Run, None] = {}
        self.new: dict[Run, None] = {}
        self.num_steps = 0
        self.num_waiting_tokens = self.news = 0
        self._journal = Journal()

    @property
    def num_new_waiting(self) -> int:
        """Number of waiting runs that were never admitted."""
        return len(self.new)

    def add(self, run: Run) -> None:
        """Queue a new run."""
        waiting, tokens = self.waiting, self.num_waiting_tokens + len(run.tokens)

        def call() -> None:
            waiting[run] = None

        def record() -> None:
            self.new[run] = None
            self._sort(run)
            self.num_waiting_tokens = tokens

        self._journal.run(call, lambda: run in waiting, record)

    def pin(self, run: Run) -> None:
        """Give a waiting run a sequence that holds its cached prefix."""
        waiting_tokens = self.num_waiting_tokens

        def record() -> None:
            held = run.held = self.found(run)
            assert held is not None
            self.pinned[run] = None
            self.num_waiting_tokens = waiting_tokens - held.num_computed_tokens
            run.pinned_news = self.news

        self._journal.run(
            # A pinned run may be unpinned again; its prefix counts once it has computed tokens.
            lambda: self.cache.add_sequence(run.tokens, id=run, tentative=True, **add_options(run.request)),
            lambda: self.found(run) is not None,
            record,
        )

    def unpin(self, run: Run) -> None:
        """Remove the sequence that a run of the queue holds: its cached prefix, or what it has computed."""
        held = run.sequence
        waiting_tokens = self.num_waiting_tokens + held.num_computed_tokens

        def record() -> None:
            run.held = None
            self.pinned.pop(run, None)
            self.num_waiting_tokens = waiting_tokens

        self._journal.run(lambda: self.cache.remove(held), lambda: self.found(run) is None, record)

    def delay(self, run: Run) -> None:
        """Unpin a run until an equal prompt of the newest step is computed."""
        self.delays[run] = run.shared_at
        run.shared_at = run.sequence.num_computed_tokens
        self.unpin(run)

    def undo_delays(self) -> None:
        """Let runs wait again for the equal prompts that the newest step does not compute."""
        for run, shared_at in self.delays.items():
            run.shared_at = shared_at

    def found(self, run: Run) -> Sequence | None:
        """Return the sequence of the cache that has `run` as its id; None if there is none."""
        found: Sequence | None = self._sequences.get(run)
        return found

    @property
    def is_settled(self) -> bool:
        """True unless an interrupted transition is open."""
        return not self._journal.is_open

    def _leave_queue(self, run: Run) -> None:
        self.waiting.pop(run, None)
        self.pinned.pop(run, None)
        self.continuing.pop(run, None)
        self.new.pop(run, None)
        self._sort(run)

    def _sort(self, run: Run) -> None:
        """Insert a run that has joined the queue into `by_priority`, or remove one that has left the queue."""
        order = self.by_priority
        if order is None:
            return
        place = bisect_left(order, run.rank, key=attrgetter("rank"))
        is_listed = order[place : place + 1] == [run]
        if run in self.waiting and not is_listed:
            order.insert(place, run)
        elif is_listed and run not in self.waiting:
            del order[place]
