"""Rows of the next step: the running runs, and the first requests of the queue that the pool can hold.

Admission tries stages of 1, 2, 4, ... requests, because `shortage` looks at all rows: it is called a logarithmic number
of times instead of once for each request. If a stage does not fit, bisection finds the part of it that fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from pagecore.serving.request import Run

if TYPE_CHECKING:
    from pagecore.cache import Sequence
    from pagecore.serving.limits import Limits
    from pagecore.serving.roster import Roster

__all__ = ["Admission", "StepRows", "select"]


@dataclass(slots=True)
class StepRows:
    """Rows of a step: first `num_decodes` runs with one token each, then chunks of prompts."""

    runs: list[Run]
    sequences: list[Sequence]
    counts: list[int]
    num_decodes: int

    def add(self, run: Run, count: int) -> None:
        """Append a row."""
        self.runs.append(run)
        self.sequences.append(run.sequence)
        self.counts.append(count)


def select(running: Iterable[Run], budget: int) -> StepRows:
    """Return rows for the running runs: all decodes, then chunks of prompts, oldest first, while the budget lasts."""
    decodes: list[Run] = []
    prompts: list[Run] = []
    for run in running:
        (prompts if run.prefilling else decodes).append(run)
    rows = StepRows(decodes, [run.sequence for run in decodes], [1] * len(decodes), len(decodes))
    budget -= len(decodes)
    for run in prompts:
        if not budget:
            break
        count = min(run.num_tokens_left, budget)
        rows.add(run, count)
        budget -= count
    return rows


class Admission:
    """One round of admissions to a step.

    Parameters
    ----------
    roster : Roster
    rows : StepRows
        Rows of the running runs; a row is appended for each admitted run.
    limits : Limits
    """

    def __init__(self, roster: Roster, rows: StepRows, limits: Limits) -> None:
        self._roster = roster
        self._rows = rows
        self._headroom = limits.headroom
        self._max_length = limits.max_length
        self._prompt_tokens = limits.prompt_tokens
        self._budget = limits.budget - sum(rows.counts)
        reserved = sum(run.samples for run in roster.running)
        self._free_rows = limits.max_running - reserved
        self._free_states = limits.state_rows - reserved
        # Tokens that each row still lacks. Budget is left only if every running prompt gets all that it lacks.
        self._needs = rows.counts.copy()

    def admit(self) -> None:
        """Admit runs from the queue, in order, while budget, rows and blocks for a whole prompt last."""
        size = 1
        while stage := self._stage(size):
            fitting = self._count_fitting(stage)
            for run in stage[:fitting]:
                self._admit(run)
            if fitting < len(stage):
                self._unpin(stage[fitting + 1 :])
                self._pin(stage[fitting])
                return
            size *= 2

    def _stage(self, size: int) -> list[Run]:
        """Pin up to `size` runs of the queue for which budget, rows and state slots suffice, and return them.

        A run that has the cache for itself needs no slots for its samples: they are preempted when they lack slots.
        """
        stage: list[Run] = []
        budget, free_rows, free_states = self._budget, self._free_rows, self._free_states
        for run in list(islice(self._roster.waiting, size)):
            if budget <= 0 or run.samples > free_rows:
                break
            if run.samples > free_states and (stage or self._roster.running):
                break
            self._pin(run)
            stage.append(run)
            budget -= run.num_tokens_left
            free_rows -= run.samples
            free_states -= run.samples
        return stage

    def _count_fitting(self, stage: list[Run]) -> int:
        """Return the number of runs at the start of the stage that fit; these are pinned."""
        if self._fits(stage):
            return len(stage)
        low, high = 0, len(stage)
        while high - low > 1:
            middle = (low + high) // 2
            self._unpin(stage[middle:])
            for run in stage[low:middle]:
                self._pin(run)
            if self._fits(stage[:middle]):
                low = middle
            else:
                high = middle
        return low

    def _fits(self, runs: list[Run]) -> bool:
        """Return True if the pool can hold the rows, the whole prompts of `runs`, and the headroom.

        In the blocks of a window, a prompt needs room for its window and one part; the step is fitted to it later.
        """
        sequences = self._rows.sequences + [run.sequence for run in runs]
        needs = self._needs + [run.num_tokens_left for run in runs]
        if self._roster.running:
            last = self._max_length - runs[-1].sequence.num_computed_tokens
            needs[-1] = min(needs[-1] + self._headroom, last)
        return not self._roster.cache.shortage(sequences, needs, step_tokens=self._prompt_tokens)

    def _admit(self, run: Run) -> None:
        left = run.num_tokens_left
        self._roster.admit(run)
        count = min(left, self._budget)
        self._rows.add(run, count)
        self._needs.append(left)
        self._budget -= count
        self._free_rows -= run.samples
        self._free_states -= run.samples

    def _pin(self, run: Run) -> None:
        """Pin the longest cached prefix of a waiting run, unless the run is swapped out."""
        roster = self._roster
        if run.held is not None:
            if run not in roster.pinned or not roster.has_news:
                return
            found = roster.cache.match_length(run.tokens, namespace=run.request.namespace)
            if found <= run.held.num_cached_tokens:
                roster.has_news = False
                return
            roster.unpin(run)
        roster.pin(run)

    def _unpin(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if run in self._roster.pinned:
                self._roster.unpin(run)
