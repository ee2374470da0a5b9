"""Counts of a scheduler that other threads may read while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagecore.serving.scheduling.reuse import Reuse
from pagecore.serving.scheduling.speculation import Speculation

if TYPE_CHECKING:
    from pagecore.serving.scheduling.roster import Roster

__all__ = ["SchedulerFigures", "read_figures"]


@dataclass(frozen=True, slots=True)
class SchedulerFigures:
    """Counts of a scheduler at one moment.

    Attributes
    ----------
    num_running, num_waiting, num_waiting_tokens : int
        Admitted runs, runs in the queue, and the tokens that these have to compute.
    num_preemptions, num_swaps, num_forks : int
        Totals since the scheduler was made.
    reuse : Reuse
    new_token_ratio : float or None
        Share of its remaining tokens that admission reserves for each run; None for a scheduler without such a ratio.
    speculation : Speculation
        Drafts that were verified and accepted.
    num_refused, num_displaced : int
        Requests that a full queue refused, and waiting runs that gave their places in it to larger priorities.
    num_idle, num_reclaimed : int
        Runs between two turns, and how often one of them gave its blocks up.
    num_loading : int
        Runs of the queue that wait for a load.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_preemptions: int
    num_swaps: int
    num_forks: int
    reuse: Reuse
    new_token_ratio: float | None = None
    speculation: Speculation = field(default_factory=Speculation)
    num_refused: int = 0
    num_displaced: int = 0
    num_idle: int = 0
    num_reclaimed: int = 0
    num_loading: int = 0


def read_figures(roster: Roster) -> SchedulerFigures:
    """Return the counts of a roster. Each is read at once; counts of one transition may be read before and after it."""
    return SchedulerFigures(
        num_running=len(roster.running),
        num_waiting=len(roster.waiting),
        num_waiting_tokens=roster.num_waiting_tokens,
        num_preemptions=roster.num_preemptions,
        num_swaps=roster.num_swaps,
        num_forks=roster.num_forks,
        reuse=roster.reuse,
        new_token_ratio=roster.ratio,
        speculation=roster.speculation,
        num_refused=roster.num_refused,
        num_displaced=roster.num_displaced,
        num_idle=len(roster.idle),
        num_reclaimed=roster.num_reclaimed,
        num_loading=len(roster.loading),
    )
