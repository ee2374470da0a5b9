"""State of a guard, for its owner to watch."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.tiers.guard.breaker import State
from pagecore.tiers.guard.core import Core


@dataclass(frozen=True, slots=True)
class GuardHealth:
    """State of a guard.

    Attributes
    ----------
    breaker : {"closed", "open", "half-open"}
    seconds_left : float
        Time until an open breaker tries the store again.
    staging_bytes, used_bytes, lost_bytes : int
        Staging memory, and its parts in use and lost to abandoned transfers that have not ended.
    refused_batches, late_batches, dropped_stores, failed_sums, num_reopened : int
        Batches that an open breaker refused; batches that missed their deadline; keys of stores that were dropped
        because the budget was in use; payloads that differed from their sums; clients that were replaced.
    """

    breaker: State
    seconds_left: float
    staging_bytes: int
    used_bytes: int
    lost_bytes: int
    refused_batches: int
    late_batches: int
    dropped_stores: int
    failed_sums: int
    num_reopened: int


def health_of(core: Core, now: float) -> GuardHealth:
    """Return the state of a guard at a time; the caller holds its lock."""
    counters, staging = core.counters, core.staging
    return GuardHealth(
        breaker=core.breaker.state(now),
        seconds_left=core.breaker.seconds_left(now),
        staging_bytes=0 if staging is None else staging.nbytes,
        used_bytes=0 if staging is None else staging.used_bytes,
        lost_bytes=0 if staging is None else staging.lost_bytes,
        refused_batches=counters.refused_batches,
        late_batches=counters.late_batches,
        dropped_stores=counters.dropped_stores,
        failed_sums=counters.failed_sums,
        num_reopened=counters.num_reopened,
    )
