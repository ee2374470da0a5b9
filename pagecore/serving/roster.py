"""The runs of a scheduler in order of arrival, and their sequences in the cache.

R1: `running` followed by `waiting` is in order of arrival.
R2: a run in `running` has a sequence that is not swapped out. A run in `waiting` has no sequence, or a sequence that is
    swapped out, or, if it is in `pinned`, a sequence that holds the cached prefix to reuse.
R3: the id of a run's sequence in the cache is the run.

Every method is one transition: an all-or-nothing call of the cache, then `record`, which updates the attributes of the
roster. A `Journal` runs the transition so that an exception (Ctrl-C, out of memory) cannot leave it half done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from pagecore.errors import PagecoreError
from pagecore.serving.journal import Journal
from pagecore.serving.request import Run, State
from pagecore.serving.reuse import Reuse
from pagecore.serving.step import Step, StepState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.cache import Batch, PagedKVCache, Sequence, SwapSpace


class Roster:
    """Runs, their sequences, and the open step.

    Attributes
    ----------
    running : dict of Run
        The admitted runs, oldest first; the values are None.
    waiting : OrderedDict of Run
        The queue, oldest first; the values are None.
    pinned : dict of Run
        The waiting runs that hold their cached prefix: between two steps the head of the queue or none.
    step : Step or None
        The open step, neither accepted nor abandoned.
    num_waiting_tokens : int
        Sum of `Run.num_tokens_left` over the queue.
    num_preemptions, num_swaps, num_forks : int
    reuse : Reuse
    has_news : bool
        True if the prefix cache may hold a longer prefix of the head of the queue than at the last match.
    """

    def __init__(self, cache: PagedKVCache, batch: Batch, swap_space: SwapSpace | None) -> None:
        self.cache = cache
        self.batch = batch
        self.swap_space = swap_space
        self.running: dict[Run, None] = {}
        self.waiting: OrderedDict[Run, None] = OrderedDict()
        self.pinned: dict[Run, None] = {}
        self.step: Step | None = None
        self.num_waiting_tokens = 0
        self.num_preemptions = self.num_swaps = self.num_forks = 0
        self.reuse = Reuse()
        self.has_news = False
        self._journal = Journal()

    def settle(self) -> None:
        """Complete or discard a transition that an exception interrupted."""
        self._journal.settle()
        if self.step is None and self.batch.in_flight:
            # The exception came after the prepare and before the caller got the step.
            self._abandon(self.running, lambda: None)

    # -- the queue -----------------------------------------------------------------------------------------------

    @property
    def head(self) -> Run:
        """The first run of the queue, which must not be empty."""
        return next(iter(self.waiting))

    def add(self, run: Run) -> None:
        """Queue a new run."""
        waiting, tokens = self.waiting, self.num_waiting_tokens + len(run.tokens)

        def call() -> None:
            waiting[run] = None

        def record() -> None:
            self.num_waiting_tokens = tokens

        self._journal.run(call, lambda: run in waiting, record)

    def pin(self, run: Run) -> None:
        """Give a waiting run a sequence that holds its cached prefix."""
        waiting_tokens = self.num_waiting_tokens

        def record() -> None:
            held = run.held = self._found(run)
            assert held is not None
            self.pinned[run] = None
            self.num_waiting_tokens = waiting_tokens - held.num_computed_tokens
            self.has_news = False

        self._journal.run(
            lambda: self.cache.add_sequence(run.tokens, id=run, namespace=run.request.namespace),
            lambda: self._found(run) is not None,
            record,
        )

    def unpin(self, run: Run) -> None:
        """Remove the sequence of a pinned run, and with it the pin on its prefix."""
        held = run.sequence
        waiting_tokens = self.num_waiting_tokens + held.num_computed_tokens

        def record() -> None:
            run.held = None
            self.pinned.pop(run, None)
            self.num_waiting_tokens = waiting_tokens

        self._journal.run(lambda: self.cache.remove(held), lambda: self._found(run) is None, record)

    # -- waiting to running and back -----------------------------------------------------------------------------

    def admit(self, run: Run) -> None:
        """Move the head of the queue, which is pinned or swapped out, to the running runs."""
        held = run.sequence
        is_back = held.is_swapped
        reuse = self.reuse if is_back else self.reuse.counted(run, self.cache.block_size)
        num_reused = run.num_reused_tokens if is_back or run.num_preemptions else held.num_cached_tokens
        waiting_tokens = self.num_waiting_tokens - run.num_tokens_left

        def call() -> None:
            if is_back:
                self.cache.swap_in([held])

        def record() -> None:
            run.state = State.RUNNING
            run.num_reused_tokens = num_reused
            self.running[run] = None
            self.waiting.pop(run, None)
            self.pinned.pop(run, None)
            self.reuse = reuse
            self.num_waiting_tokens = waiting_tokens

        self._journal.run(call, lambda: not held.is_swapped, record)

    def preempt(self, run: Run) -> None:
        """Move the youngest running run to the front of the queue, swapped out or without a sequence."""
        held = run.sequence
        tokens = np.asarray(held.tokens)
        preemptions, run_preemptions = self.num_preemptions + 1, run.num_preemptions + 1
        swaps, waiting_tokens, computed = self.num_swaps, self.num_waiting_tokens, held.num_computed_tokens

        def call() -> None:
            if self.swap_space is None or not self.cache.try_swap_out([held], self.swap_space):
                self.cache.remove(held)

        def record() -> None:
            is_saved = held.is_swapped
            run.held = held if is_saved else None
            run.tokens = tokens
            run.prefilling = True
            run.state = State.WAITING
            run.num_preemptions = run_preemptions
            self.waiting[run] = None
            self.waiting.move_to_end(run, last=False)
            self.running.pop(run, None)
            self.num_waiting_tokens = waiting_tokens + len(tokens) - (computed if is_saved else 0)
            self.num_preemptions = preemptions
            self.num_swaps = swaps + is_saved

        self._journal.run(call, lambda: held.is_swapped or self._found(run) is None, record)

    def cancel(self, run: Run) -> None:
        """End a run that has not ended, and remove its sequence."""
        tokens = run.tokens if run.held is None else np.asarray(run.held.tokens)
        waiting_tokens = self.num_waiting_tokens - (run.num_tokens_left if run in self.waiting else 0)
        # The first sample represents all samples until they are forked.
        parent = run.parent if run.held is None and run not in self.waiting else None
        samples = 0 if parent is None else parent.samples - 1
        ended = (run, *run.siblings) if run.samples > 1 else (run,)

        def record() -> None:
            run.held = None
            run.tokens = tokens
            for each in ended:
                each.state = State.CANCELLED
            run.siblings = ()
            if parent is not None:
                parent.samples = samples
            for part in (self.waiting, self.pinned, self.running):
                part.pop(run, None)
            self.num_waiting_tokens = waiting_tokens
            self.has_news = True

        self._journal.run(lambda: self._leave_cache(run), lambda: self._found(run) is None, record)

    # -- the step ------------------------------------------------------------------------------------------------

    def commit(self, step: Step) -> None:
        """Commit a step, and fork the prompts that it completes into their samples."""
        prompts = step.runs[step.num_decodes :]
        samples: dict[Run, list[Run]] = {}
        for run in step.outputs[step.num_decodes :]:
            if not run.has_ended:
                # A sample that is not forked yet follows the first sample and has no sequence.
                samples.setdefault(run.parent if run.parent and run.held is None else run, []).append(run)
        forks = self.num_forks + sum(len(runs) - 1 for runs in samples.values())
        has_news = self.has_news or bool(prompts)

        def record() -> None:
            for run in prompts:
                run.prefilling = run.held is not None and run.held.num_computed_tokens < len(run.tokens)
            for parent, runs in samples.items():
                for run in runs[1:]:
                    self._fork(parent, run)
                parent.samples, parent.siblings = 1, ()
            if forks != self.num_forks:
                # Samples are adjacent: R1.
                self.running = {run: None for first in self.running for run in samples.get(first, (first,))}
            self.num_forks = forks
            self.has_news = has_news
            step.state = StepState.COMMITTED

        self._journal.run(lambda: self.cache.commit(self.batch), lambda: not self.batch.in_flight, record)

    def abandon(self, step: Step) -> None:
        """Undo the prepare of a step."""

        def close() -> None:
            step.state = StepState.ABANDONED
            self.step = None

        self._abandon(step.runs, close)

    def accept(
        self, step: Step, going: list[Sequence], ids: NDArray[np.int32], finished: Mapping[Run, NDArray[np.int32]]
    ) -> None:
        """Append one id to each continuing sequence, and end the finished runs with their complete tokens."""

        def call() -> None:
            if going:
                self.cache.append_tokens(going, ids)

        def record() -> None:
            for run, tokens in finished.items():
                run.tokens = tokens
                run.state = State.FINISHED
                self._leave_cache(run)
                run.held = None
                self.running.pop(run, None)
            self.has_news = self.has_news or bool(finished)
            step.finished = tuple(finished)
            step.state = StepState.ACCEPTED
            self.step = None

        # After the commit all tokens of an output are computed; a further token shows that the append happened.
        self._journal.run(call, lambda: not going or going[0].num_tokens > going[0].num_computed_tokens, record)

    # -- inside --------------------------------------------------------------------------------------------------

    def _abandon(self, runs: Iterable[Run], close: Callable[[], None]) -> None:
        """Abandon the batch. Decoding runs whose states went back to a checkpoint compute the tokens after it again."""

        def record() -> None:
            for run in runs:
                held = run.held
                if held is not None and not run.prefilling and held.num_computed_tokens + 1 < held.num_tokens:
                    run.tokens = np.asarray(held.tokens)
                    run.prefilling = True
            close()

        self._journal.run(lambda: self.cache.abandon(self.batch), lambda: not self.batch.in_flight, record)

    def _found(self, run: Run) -> Sequence | None:
        return self.cache.sequences.get(run)

    def _leave_cache(self, run: Run) -> None:
        held = self._found(run)
        if held is not None:
            self.cache.remove(held)

    def _fork(self, parent: Run, run: Run) -> None:
        held = self._found(run)
        run.held = self.cache.fork(parent.sequence, id=run) if held is None else held
        run.prefilling = False
        run.state = State.RUNNING

    def check_invariants(self) -> None:
        """Check R1 to R3 and every count; raise `PagecoreError` if one does not hold."""
        self._check(not self._journal.is_open, "a transition is open")
        for run in self.running:
            is_held = run.held is not None and run.held is self._found(run) and not run.held.is_swapped
            self._check(is_held and run.state is State.RUNNING, f"{run!r} is running without its sequence in the cache")
        for run in self.waiting:
            is_held = run.held is not None and (run.held.is_swapped or run in self.pinned)
            is_right = is_held if self._found(run) is not None else run.held is None
            self._check(is_right and run.state is State.WAITING, f"{run!r} is waiting but holds {run.held!r}")
        self._check(self.waiting.keys() >= self.pinned.keys(), "a pinned run is not in the queue")
        arrivals = [run.arrival for part in (self.running, self.waiting) for run in part]
        is_ordered = all(first <= second for first, second in pairwise(arrivals))
        self._check(is_ordered, f"runs are not in order of arrival: {arrivals}")
        tokens = sum(run.num_tokens_left for run in self.waiting)
        self._check(self.num_waiting_tokens == tokens, f"{self.num_waiting_tokens=}, counted {tokens}")
        is_scheduled = self.step is not None and self.step.state is StepState.SCHEDULED
        self._check(self.batch.in_flight == is_scheduled, f"{self.batch.in_flight=} for {self.step!r}")

    def _check(self, holds: bool, message: str) -> None:
        if not holds:
            raise PagecoreError(f"inconsistent scheduler state: {message}")
