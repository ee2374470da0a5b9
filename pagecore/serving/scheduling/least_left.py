"""Least number of tokens that a running run has left: while it is large, no run can end by its length."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["LeastLeft"]

# A count that gives less than this is not worth its time: it looks at every run, as the check that it saves.
WORTHWHILE = 16
PAUSE_MAX = 64


class LeastLeft(NamedTuple):
    """Lower bound on the tokens that each running run has left before its `last_length`.

    Each accept lowers it by the ids that a run gains at most. At 0 the runs are counted; after a count that was of
    little use, as where runs of fixed lengths end every few steps, the next ones wait for more accepts.

    Attributes
    ----------
    bound : int
    pause : int
        Accepts without a bound between the last count and the next.
    due : int
        Those that are left.
    """

    bound: int = 0
    pause: int = 0
    due: int = 0

    def with_run(self, num_left: int) -> LeastLeft:
        """Return the bound with another run."""
        return self if self.bound <= num_left else self._replace(bound=max(num_left, 0))

    def after(self, most: int, count: Callable[[], int]) -> LeastLeft:
        """Return the bound after an accept of up to `most` ids a run; `count` returns the exact number before it."""
        if self.bound > most:
            return self._replace(bound=self.bound - most)
        if self.due:
            return self._replace(bound=0, due=self.due - 1)
        bound = max(count() - most, 0)
        pause = 0 if bound >= WORTHWHILE else min(max(2 * self.pause, 1), PAUSE_MAX)
        return LeastLeft(bound, pause, pause)
