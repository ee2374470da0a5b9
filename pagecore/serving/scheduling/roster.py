"""The runs of a scheduler, and their sequences in the cache.

R1: `running` is in order of admission. In `waiting`, preempted runs precede the others, which are in order of arrival.
R2: a run in `running` has a sequence that is not swapped out. A run in `waiting` has no sequence, or a sequence that is
    swapped out, or, if it is in `pinned`, a sequence that holds the cached prefix to reuse.
R3: the id of a run's sequence in the cache is the run.
R4: of two open steps the first is committed; its ids are not accepted yet.

Every method is one transition: an all-or-nothing call of the cache, then `record`, which updates the attributes of the
roster. A `Journal` runs the transition so that an exception (Ctrl-C, out of memory) cannot leave it half done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pagecore.serving.scheduling.crossing import lacks_room
from pagecore.serving.scheduling.future import ratio_after_retraction
from pagecore.serving.scheduling.request import Run, State
from pagecore.serving.scheduling.reuse import Reuse
from pagecore.serving.scheduling.speculation import Speculation
from pagecore.serving.scheduling.step import Step, StepState
from pagecore.serving.scheduling.waiting import WaitingRuns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.cache import Batch, PagedKVCache, Sequence, SwapSpace
    from pagecore.serving.scheduling.future import Ratios
    from pagecore.serving.scheduling.verified import Accepted


class Roster(WaitingRuns):
    """Runs, their sequences, and the open steps; those of the queue are in `WaitingRuns`.

    Attributes
    ----------
    running : dict of Run
        The admitted runs, in order of admission; the values are None.
    batch : Batch
        Batch of the newest step.
    steps : tuple of Step
        The open steps, neither accepted nor abandoned, oldest first; two only with overlap.
    must_accept : bool
        True if the open step must be accepted before another one is scheduled, because a step ahead of it was
        abandoned.
    num_steps : int
        Number of steps so far.
    ratio : float or None
        Share of `max_new_tokens` that admissions reserve for each run; None if they reserve nothing.
    num_preemptions, num_swaps, num_forks : int
    num_refused, num_displaced : int
        Requests that a full queue refused, and waiting runs that gave their places in it to others.
    reuse : Reuse
    speculation : Speculation
    num_prompt_steps : int
        Number of committed steps that computed prompts.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        batches: list[Batch],
        swap_space: SwapSpace | None,
        ratios: Ratios | None = None,
        policy: str = "fcfs",
    ) -> None:
        super().__init__(cache, policy)
        self.batches = batches
        self.batch = batches[0]
        self.swap_space = swap_space
        self.ratios = ratios
        self.ratio = None if ratios is None else ratios.first
        # Every commit counts as news, not only those of prompts.
        self.follows_tree = policy == "lpm"
        self.running: dict[Run, None] = {}
        self.steps: tuple[Step, ...] = ()
        self.must_accept = False
        self.num_steps = 0
        self.num_preemptions = self.num_swaps = self.num_forks = 0
        self.num_refused = self.num_displaced = 0
        self.reuse = Reuse()
        self.speculation = Speculation()
        self.num_prompt_steps = 0

    def settle(self) -> None:
        """Complete or discard a transition that an exception interrupted."""
        self._journal.settle()
        if self.batch.in_flight and not (self.steps and self.steps[-1].state is StepState.SCHEDULED):
            # The exception came after the prepare and before the caller got the step.
            self._abandon(self.running, lambda: None)

    @property
    def step(self) -> Step | None:
        """The newest open step."""
        return self.steps[-1] if self.steps else None

    def switch_batch(self) -> None:
        """Choose the batch of the next step; that of an open step stays as it is if there are two."""
        is_first_used = bool(self.steps) and self.steps[-1].batch is self.batches[0]
        self.batch = self.batches[-1] if is_first_used else self.batches[0]

    # -- waiting to running and back -----------------------------------------------------------------------------

    def admit(self, run: Run) -> None:
        """Move a run of the queue, which is pinned or swapped out, to the running runs."""
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
            self._leave_queue(run)
            self.reuse = reuse
            self.num_waiting_tokens = waiting_tokens

        self._journal.run(call, lambda: not held.is_swapped, record)

    def preempt(self, run: Run, *, swap: bool = True, is_retraction: bool = True) -> None:
        """Move a running run to the front of the queue, swapped out or without a sequence.

        A retraction, which makes room for other running runs, sets the ratio.
        """
        held = run.sequence
        tokens = np.asarray(held.tokens)
        preemptions, run_preemptions = self.num_preemptions + 1, run.num_preemptions + 1
        swaps, waiting_tokens, computed = self.num_swaps, self.num_waiting_tokens, held.num_computed_tokens
        news = self.news + 1
        ratio = self.ratio
        if ratio is not None and is_retraction:
            ratio = ratio_after_retraction(other for other in self.running if other is not run)

        def call() -> None:
            space = self.swap_space if swap else None
            if space is None or not self.cache.try_swap_out([held], space):
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
            self._sort(run)
            self.running.pop(run, None)
            self.num_waiting_tokens = waiting_tokens + len(tokens) - (computed if is_saved else 0)
            self.num_preemptions = preemptions
            self.num_swaps = swaps + is_saved
            run.waits_since = self.num_steps
            run.matched_at = -1
            self.ratio = ratio
            self.news = news

        self._journal.run(call, lambda: held.is_swapped or self.found(run) is None, record)

    @property
    def lacks_encoder_room(self) -> bool:
        """True if rows or blocks are short for the encoder output of a run that holds a sequence."""
        return lacks_room(self.cache, self.running, [run for run in self.waiting if run.held is not None])

    def release_encoder_output(self) -> bool:
        """Let swapped runs be computed again, to free an encoder output on the device that only they hold.

        Such an output is left when its last run on the device ends. Return False if there is none.
        """
        in_use = {run.sequence.cross_row for run in (*self.running, *self.pinned) if run.request.cross_tokens}
        left: dict[int, list[Run]] = {}
        for run in self.waiting:
            held = run.held if run.request.cross_tokens else None
            if held is not None and held.is_swapped and held.cross_row >= 0 and held.cross_row not in in_use:
                left.setdefault(held.cross_row, []).append(run)
        if not left:
            return False
        # Runs at the front of the queue continue first, so the output whose first run is furthest back goes.
        for run in list(left.values())[-1]:
            self.unpin(run)
        return True

    def cancel(self, run: Run, successor: Run | None = None) -> None:
        """End a run that has not ended, and remove its sequence; queue `successor`, a new run, in its place."""
        tokens = run.tokens if run.held is None else np.asarray(run.held.tokens)
        waiting_tokens = self.num_waiting_tokens - (run.num_tokens_left if run in self.waiting else 0)
        waiting_tokens += 0 if successor is None else len(successor.tokens)
        # The first sample represents all samples until they are forked.
        parent = run.parent if run.held is None and run not in self.waiting else None
        samples = 0 if parent is None else parent.samples - 1
        news = self.news + 1
        displaced = self.num_displaced + (successor is not None)
        ended = (run, *run.siblings) if run.samples > 1 else (run,)

        def record() -> None:
            run.held = None
            run.tokens = tokens
            for each in ended:
                each.state = State.CANCELLED
            run.siblings = ()
            if parent is not None:
                parent.samples = samples
            self._leave_queue(run)
            self.running.pop(run, None)
            if successor is not None:
                self.waiting[successor] = None
                self._sort(successor)
            self.num_displaced = displaced
            self.num_waiting_tokens = waiting_tokens
            self.news = news

        self._journal.run(lambda: self._leave_cache(run), lambda: self.found(run) is None, record)

    # -- the step ------------------------------------------------------------------------------------------------

    def commit(self, step: Step, accepted: Accepted | None = None) -> None:
        """Commit a step, and fork the prompts that it completes into their samples; None accepts all tokens."""
        prompts = step.runs[step.num_decodes :]
        samples: dict[Run, list[Run]] = {}
        for run in step.outputs[step.num_decodes :]:
            if not run.has_ended:
                # A sample that is not forked yet follows the first sample and has no sequence.
                samples.setdefault(run.parent if run.parent and run.held is None else run, []).append(run)
        forks = self.num_forks + sum(len(runs) - 1 for runs in samples.values())
        news = self.news + (bool(prompts) or self.follows_tree)
        prompt_steps = self.num_prompt_steps + bool(prompts)

        def record() -> None:
            for run in prompts:
                run.prefilling = run.held is not None and run.held.num_computed_tokens < len(run.tokens)
            for parent, runs in samples.items():
                for run in runs[1:]:
                    self._fork(parent, run)
                parent.samples, parent.siblings = 1, ()
            if forks != self.num_forks:
                # Samples are adjacent.
                self.running = {run: None for first in self.running for run in samples.get(first, (first,))}
            self.num_forks = forks
            self.news, self.num_prompt_steps = news, prompt_steps
            step.accepted = None if accepted is None else accepted.counts
            step.state = StepState.COMMITTED

        def call() -> None:
            if accepted is None:
                self.cache.commit(self.batch)
            elif accepted.paths is not None:
                self.cache.commit(self.batch, accepted_path=accepted.paths)
            else:
                self.cache.commit(self.batch, accepted.by_row)

        self._journal.run(call, lambda: not self.batch.in_flight, record)

    def abandon(self, step: Step) -> None:
        """Undo the prepare of the newest step."""
        steps = self.steps[:-1]

        def close() -> None:
            step.state = StepState.ABANDONED
            self.steps = steps

        self._abandon(step.runs, close)

    def accept(
        self,
        step: Step,
        going: list[Sequence],
        ids: NDArray[np.int32] | list[list[int]],
        finished: Mapping[Run, NDArray[np.int32]],
    ) -> None:
        """Append ids to each sequence of `going`, and end the finished runs with their complete tokens."""
        steps = self.steps[1:]
        # Not counted by `commit`, which a device may wait for.
        speculation = self.speculation.counted(step) if step.has_drafts else self.speculation
        news = self.news + bool(finished)
        known = going[0].num_tokens if going else 0

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
            if self.must_accept:
                self._return_to_prompts(self.running)
                self.must_accept = False
            self.news = news
            self.speculation = speculation
            step.finished = tuple(finished)
            step.state = StepState.ACCEPTED
            self.steps = steps

        self._journal.run(call, lambda: not going or going[0].num_tokens > known, record)

    # -- inside --------------------------------------------------------------------------------------------------

    def _abandon(self, runs: Iterable[Run], close: Callable[[], None]) -> None:
        """Abandon the batch. While ids of the step before are missing, `accept` completes the runs instead."""

        def record() -> None:
            close()
            self.undo_delays()
            self.must_accept = bool(self.steps)
            if not self.must_accept:
                self._return_to_prompts(runs)

        self._journal.run(lambda: self.cache.abandon(self.batch), lambda: not self.batch.in_flight, record)

    def _return_to_prompts(self, runs: Iterable[Run]) -> None:
        """Let decoding runs whose states went back to a checkpoint compute the tokens after it again, as a prompt."""
        for run in runs:
            held = run.held
            if held is not None and not run.prefilling and held.num_computed_tokens + 1 < held.num_tokens:
                run.tokens = np.asarray(held.tokens)
                run.prefilling = True

    def _leave_cache(self, run: Run) -> None:
        held = self.found(run)
        if held is not None:
            self.cache.remove(held)

    def _fork(self, parent: Run, run: Run) -> None:
        held = self.found(run)
        run.held = self.cache.fork(parent.sequence, id=run) if held is None else held
        run.prefilling = False
        run.state = State.RUNNING
