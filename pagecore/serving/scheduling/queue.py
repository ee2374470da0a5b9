"""Order in which an admission looks at the queue.

"fcfs" takes the queue as it is: preempted runs first, then the others in order of arrival. "lpm" prefers the longest
cached prefix, as SGLang does, and "priority" the largest priority. Under both, the runs that have waited for
`max_wait_steps` steps go before all others, in the order of the queue. An admission reads only the part of the queue
that it takes, and under "priority" also the preempted runs. Runs that wait for a load are passed over.
"""

from __future__ import annotations

from itertools import filterfalse, islice
from typing import TYPE_CHECKING

from pagecore.serving.scheduling.crossing import match_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pagecore.serving.scheduling.limits import Limits
    from pagecore.serving.scheduling.request import Run
    from pagecore.serving.scheduling.roster import Roster

__all__ = ["MATCHED_MAX", "Queue"]

# "lpm" looks up the prefixes of the oldest runs of the queue, up to this number; SGLang has the same limit.
MATCHED_MAX = 128


class Queue:
    """The queue of one admission. The caller admits the runs that it takes, or skips them.

    Parameters
    ----------
    roster : Roster
        A run of its queue waits for no load.
    limits : Limits

    Attributes
    ----------
    first : Run
        The run that is next before any is taken.
    num_skipped : int
        Number of taken runs that the caller did not admit and that are still in the queue.
    """

    def __init__(self, roster: Roster, limits: Limits) -> None:
        self._waiting = roster.waiting
        self._loading = roster.loading
        self._by_priority = roster.by_priority
        self._late = roster.num_steps - limits.max_wait_steps
        self._matched = self._match(roster) if limits.policy == "lpm" else []
        self.num_skipped = 0
        self.first = self.take(1)[0]

    def take(self, count: int) -> list[Run]:
        """Return the next `count` runs, or fewer at the end of the queue."""
        # Admitted runs have left the queue; skipped ones are still at the front of the order.
        return self._front(self.num_skipped + count)[self.num_skipped :]

    def _front(self, count: int) -> list[Run]:
        """Return the first `count` runs of the order."""
        if self._by_priority is not None:
            front = list(islice(self._late_runs(), count))
            fresh = (run for run in self._ready(self._by_priority) if not self.is_late(run))
            return front + list(islice(fresh, count - len(front)))
        matched = [run for run in self._matched if run in self._waiting]
        return matched[:count] + list(islice(self._ready(self._waiting), len(matched), max(count, len(matched))))

    def _ready(self, runs: Iterable[Run]) -> Iterator[Run]:
        """Return an iterator over the runs that wait for no load."""
        return filterfalse(self._loading.__contains__, runs) if self._loading else iter(runs)

    def _late_runs(self) -> Iterator[Run]:
        """Yield the late runs of the queue; after the preempted runs, the oldest come first."""
        for run in self._ready(self._waiting):
            if self.is_late(run):
                yield run
            elif not run.goes_first:
                return

    def is_late(self, run: Run) -> bool:
        """Return True if a run has waited for `max_wait_steps`."""
        return run.waits_since <= self._late

    def _match(self, roster: Roster) -> list[Run]:
        """Return the oldest runs in the order of "lpm"; look up their prefixes again once prompts were computed.

        Decodes evict blocks and add the tokens that they generate, which few prompts contain; a lookup of all these
        runs takes milliseconds if their prompts are long, so that decodes alone do not cause one.
        """
        runs = list(islice(self._ready(self._waiting), MATCHED_MAX))
        for run in runs:
            if run.matched_at != roster.num_prompt_steps:
                held = run.held if run in roster.continuing else None
                found = roster.cache.match_length(run.tokens, **match_options(run.request)) if held is None else 0
                run.match_length = found if held is None else held.num_computed_tokens
                run.matched_at = roster.num_prompt_steps
        runs.sort(key=lambda run: (0, 0, 0) if self.is_late(run) else (1, not run.goes_first, -run.match_length))
        return runs
