"""Order in which an admission looks at the queue.

"fcfs" takes the queue as it is: preempted runs first, then the others in order of arrival. "lpm" prefers the longest
cached prefix, as SGLang does, and "priority" the largest priority. Under both, a run that has waited for
`max_wait_steps` steps goes before all others.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from pagecore.serving.scheduling.crossing import match_options

if TYPE_CHECKING:
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
    limits : Limits

    Attributes
    ----------
    first : Run
        The run that is next before any is taken; the queue must not be empty.
    num_skipped : int
        Number of taken runs that the caller did not admit and that are still in the queue.
    """

    def __init__(self, roster: Roster, limits: Limits) -> None:
        self._waiting = roster.waiting
        self._order = None if limits.policy == "fcfs" else sort_queue(roster, limits)
        self._taken = 0
        self.num_skipped = 0
        self.first = next(iter(self._waiting if self._order is None else self._order))

    def take(self, count: int) -> list[Run]:
        """Return the next `count` runs, or fewer at the end of the queue."""
        if self._order is None:
            # Admitted runs have left the queue; skipped ones are still at its front.
            return list(islice(self._waiting, self.num_skipped, self.num_skipped + count))
        taken = self._order[self._taken : self._taken + count]
        self._taken += len(taken)
        return taken


def sort_queue(roster: Roster, limits: Limits) -> list[Run]:
    """Return the runs of the queue in the order of the policy; ties keep the order of the queue."""
    late = roster.num_steps - limits.max_wait_steps
    order = list(roster.waiting)
    if limits.policy == "priority":
        order.sort(key=lambda run: (run.waits_since > late, -run.request.priority, run.arrival))
    else:
        _match(roster, order[:MATCHED_MAX])
        order.sort(key=lambda run: (run.waits_since > late, not run.num_preemptions, -run.match_length))
    return order


def _match(roster: Roster, runs: list[Run]) -> None:
    """Look up the cached prefixes of runs whose last look-up is older than the news of the cache."""
    for run in runs:
        if run.match_news != roster.news:
            run.match_length = roster.cache.match_length(run.tokens, **match_options(run.request))
            run.match_news = roster.news
