"""The runs of a scheduler, and their sequences in the cache.

R1: `running` is in order of admission. In `waiting`, preempted runs precede the others, which are in order of arrival.
R2: a run in `running` has a sequence that is not swapped out. A run in `waiting` has no sequence, or a sequence that is
    swapped out, or, if it is in `pinned`, a sequence that holds the cached prefix to reuse, or, if it is in
    `continuing`, what it computed in its last turn. For idle runs see `idle.py`.
R3: the id of a run's sequence in the cache is the run.
R4: of two open steps the first is committed; its ids are not accepted yet.
R5: no running run has fewer than `least_left.bound` tokens before its end.

Every method is one transition: an all-or-nothing call of the cache, then `record`, which updates the attributes of the
roster. A `Journal` runs the transition so that an exception (Ctrl-C, out of memory) cannot leave it half done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pagecore.cache.methods.prefix import DEVICE_MEDIUM
from pagecore.errors import OutOfRows
from pagecore.serving.scheduling.admitted import AdmittedRuns
from pagecore.serving.scheduling.request import Run, State
from pagecore.serving.scheduling.speculation import Speculation
from pagecore.serving.scheduling.step import Step, StepState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.cache import Batch, PagedKVCache, Sequence, SwapSpace
    from pagecore.serving.scheduling.future import Ratios
    from pagecore.serving.scheduling.least_left import LeastLeft
    from pagecore.serving.scheduling.verified import Accepted


class Roster(AdmittedRuns):
    """Runs, their sequences, and the open steps.

    The queue is in `WaitingRuns`, and the way of runs from it and back in `AdmittedRuns`.

    Attributes
    ----------
    batch : Batch
        Batch of the newest step.
    steps : tuple of Step
        The open steps, neither accepted nor abandoned, oldest first; two only with overlap.
    must_accept : bool
        True if the open step must be accepted before another one is scheduled, because a step ahead of it was
        abandoned.
    num_forks : int
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
        super().__init__(cache, swap_space, ratios, policy)
        self.batches = batches
        self.batch = batches[0]
        # Every commit counts as news, not only those of prompts.
        self.follows_tree = policy == "lpm"
        self.steps: tuple[Step, ...] = ()
        self.must_accept = False
        self.num_forks = 0
        self.speculation = Speculation()
        self.num_prompt_steps = 0

    @property
    def may_be_interrupted(self) -> bool:
        """True if an exception has interrupted a transition, or another thread is in one."""
        return self._journal.is_open or self._has_lost_step

    def settle(self) -> None:
        """Complete or discard a transition that an exception interrupted."""
        self._journal.settle()
        if self._has_lost_step:
            self._abandon(self.running, lambda: None)

    @property
    def _has_lost_step(self) -> bool:
        """True if the batch is prepared and no caller has the step."""
        return self.batch.in_flight and not (self.steps and self.steps[-1].state is StepState.SCHEDULED)

    @property
    def step(self) -> Step | None:
        """The newest open step."""
        return self.steps[-1] if self.steps else None

    def switch_batch(self) -> None:
        """Choose the batch of the next step; that of an open step stays as it is if there are two."""
        is_first_used = bool(self.steps) and self.steps[-1].batch is self.batches[0]
        self.batch = self.batches[-1] if is_first_used else self.batches[0]

    # -- the step ------------------------------------------------------------------------------------------------

    def commit(self, step: Step, accepted: Accepted | None = None) -> None:
        """Commit a step, and fork the prompts that it completes into their samples; None accepts all tokens."""
        prompts = step.runs[step.num_decodes :]
        samples: dict[Run, list[Run]] = {}
        for run in step.outputs[step.num_decodes :] if self.has_samples else ():
            if not run.has_ended:
                # A sample that is not forked yet follows the first sample and has no sequence.
                samples.setdefault(run.parent if run.parent and run.held is None else run, []).append(run)
        forks = self.num_forks + sum(len(runs) - 1 for runs in samples.values())
        news = self.news + (bool(prompts) or self.follows_tree)
        prompt_steps = self.num_prompt_steps + bool(prompts)
        first = [run.query for run in prompts if run.held is not None and not run.hit_tokens and run.query is not None]
        reuse = self.reuse.counted(first) if first else self.reuse
        self._require_rows(forks - self.num_forks, step)

        def record() -> None:
            has_tiers = self.cache.has_tiers
            for run in prompts:
                if run.held is not None and not run.hit_tokens:
                    found = run.held.num_cached_tokens
                    run.hit_tokens = self.cache.hit_tokens(run.held) if has_tiers else {DEVICE_MEDIUM: found}
                run.prefilling = run.held is not None and run.held.num_computed_tokens < len(run.tokens)
            for parent, runs in samples.items():
                for run in runs[1:]:
                    self._fork(parent, run)
                parent.samples, parent.siblings = 1, ()
            if forks != self.num_forks:
                # Samples are adjacent.
                self.running = {run: None for first in self.running for run in samples.get(first, (first,))}
            self.num_forks = forks
            self.reuse = reuse
            self.news, self.num_prompt_steps = news, prompt_steps
            step.accepted = None if accepted is None else accepted.counts
            step._gained = None if accepted is None else accepted.gained
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
        counts: NDArray[np.int64] | None,
        least_left: LeastLeft,
    ) -> None:
        """Append ids to each sequence of `going`, and end the finished runs, or their turns, with complete tokens.

        With `counts` the first ids of each row of a table, at least 1. `least_left` is that after the accept.
        """
        steps = self.steps[1:]
        # Not counted by `commit`, which a device may wait for.
        speculation = self.speculation.counted(step) if step.has_drafts else self.speculation
        news = self.news + bool(finished)
        known = going[0].num_tokens if going else 0

        def call() -> None:
            if going:
                self.cache.append_tokens(going, ids, *(() if counts is None else (counts,)))

        def record() -> None:
            for run, tokens in finished.items():
                run.tokens = tokens
                if run.request.resumable:
                    self.make_idle(run)
                else:
                    run.state = State.FINISHED
                    self._leave_cache(run)
                    run.held = None
                self.running.pop(run, None)
            for run in step.runs if self.idle else ():
                if run in self.idle:  # this step was ahead of the end of its turn
                    self.append_computed_ids(run)
            if self.must_accept:
                self._return_to_prompts(self.running)
                self.must_accept = False
            self.news = news
            self.least_left = least_left
            self.speculation = speculation
            step.finished = tuple(finished)
            step.state = StepState.ACCEPTED
            self.steps = steps

        self._journal.run(call, lambda: not going or going[0].num_tokens > known, record)

    def least_left_after(
        self, ids: NDArray[np.int32] | list[list[int]], counts: NDArray[np.int64] | None, finished: Mapping[Run, object]
    ) -> LeastLeft:
        """Return `least_left` after an accept."""
        if isinstance(ids, list):
            most = max(map(len, ids), default=0)
        else:
            most = 1 if counts is None else int(counts.max(initial=0))

        def count() -> int:
            lefts = [run.last_length - run.sequence.num_tokens for run in self.running if run not in finished]
            return min(lefts, default=0)

        return self.least_left.after(most, count)

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

    def _require_rows(self, wanted: int, step: Step) -> None:
        """Raise OutOfRows unless the cache has rows for the samples that a commit forks; others give theirs up."""
        if not wanted:
            return
        most = self.cache.max_sequences
        for run in (*self.victims(), *self.pinned):
            if self.num_used_rows + wanted <= most:
                return
            if run not in step.runs:  # the row of a run that became idle is in flight
                (self.unpin if run in self.pinned else self.reclaim)(run)
        used = self.num_used_rows
        if used + wanted > most:
            raise OutOfRows(
                f"the samples of this step need {wanted} rows, and {most - used} of {most} are free: imports, or "
                "holders outside the scheduler, have the others; cancel an import, or samples, then commit again"
            )

    def _fork(self, parent: Run, run: Run) -> None:
        held = self.found(run)
        run.held = self.cache.fork(parent.sequence, id=run) if held is None else held
        run.prefilling = False
        run.hit_tokens = dict(parent.hit_tokens)
        run.state = State.RUNNING
