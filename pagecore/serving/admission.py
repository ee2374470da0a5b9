"""Rows of the next step: the runs, and the first requests of the queue that the pool can hold.

Admission tries 1, 2, 4, ... requests at a time, so that `shortage`, which looks at all rows, is called a logarithmic
number of times and not once for each request. Where a stage does not fit, bisection finds how many of it do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from pagecore.serving.request import Run

if TYPE_CHECKING:
    from pagecore.cache import Sequence
    from pagecore.serving.roster import Roster

__all__ = ["Admission", "Rows", "select"]


@dataclass(slots=True)
class Rows:
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


def select(running: Iterable[Run], budget: int) -> Rows:
    """Return the rows of the runs: all decodes, then chunks of prompts, oldest first, while the budget lasts."""
    decodes: list[Run] = []
    prompts: list[Run] = []
    for run in running:
        (prompts if run.prefilling else decodes).append(run)
    rows = Rows(decodes, [run.sequence for run in decodes], [1] * len(decodes), len(decodes))
    budget -= len(decodes)
    for run in prompts:
        if not budget:
            break
        count = min(run.num_tokens_left, budget)
        rows.add(run, count)
        budget -= count
    return rows


@dataclass(slots=True)
class Admission:
    """One round of admissions to a step.

    Parameters
    ----------
    roster : Roster
    rows : Rows
        The rows of the runs, to which those of the admitted are appended.
    budget : int
        Tokens that the step has room for.
    places : int
        Sequences that may still be admitted.
    headroom : int
        Slots that must stay free, unless nothing else runs.
    max_length : int
        Slots of the longest sequence.
    """

    roster: Roster
    rows: Rows
    budget: int
    places: int
    headroom: int
    max_length: int
    # Tokens that each row still lacks. Budget is left only where every prompt that runs gets all that it lacks.
    _needs: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._needs = self.rows.counts.copy()

    def admit(self) -> None:
        """Admit from the queue, in order, while budget, places and blocks for a whole prompt last."""
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
        """Pin up to `size` runs of the queue that budget and places suffice for."""
        stage: list[Run] = []
        budget, places = self.budget, self.places
        for run in list(islice(self.roster.waiting, size)):
            if budget <= 0 or run.samples > places:
                break
            self._pin(run)
            stage.append(run)
            budget -= run.num_tokens_left
            places -= run.samples
        return stage

    def _count_fitting(self, stage: list[Run]) -> int:
        """Return how many of the stage fit, in order; those are pinned."""
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
        """Return True if the pool can hold the whole prompts of `runs`, and the headroom, in addition to the rows."""
        sequences = self.rows.sequences + [run.sequence for run in runs]
        needs = self._needs + [run.num_tokens_left for run in runs]
        if self.roster.running:
            last = self.max_length - runs[-1].sequence.num_computed_tokens
            needs[-1] = min(needs[-1] + self.headroom, last)
        return not self.roster.cache.shortage(sequences, needs)

    def _admit(self, run: Run) -> None:
        left = run.num_tokens_left
        self.roster.admit(run)
        count = min(left, self.budget)
        self.rows.add(run, count)
        self._needs.append(left)
        self.budget -= count
        self.places -= run.samples

    def _pin(self, run: Run) -> None:
        """Give a waiting run the longest prefix that the cache has of it, unless it is swapped out."""
        roster = self.roster
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
            if run in self.roster.pinned:
                self.roster.unpin(run)
