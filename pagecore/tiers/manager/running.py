"""Loads that run: their progress, on all ranks alike, from the request until nothing of them is open or pinned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import PagecoreError
from pagecore.tiers.manager.loading.load import Load
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.stats import RequestStats
from pagecore.tiers.store import StoreStats

__all__ = ["Agree", "RunningLoads"]

# Elementwise minimum over all ranks of an int64 array; every rank calls it with an array of the same length.
Agree = Callable[[NDArray[np.int64]], NDArray[np.int64]]


class RunningLoads:
    """The loads of one cache, which the caller protects by a lock.

    Parameters
    ----------
    agree : callable, optional
        Elementwise minimum over ranks; see `Tiers`.
    pin_seconds : float
        Seconds after the end of a request for which its prefix stays pinned in the host, unless it is released.
    retired : callable
        ``retired(load)`` is called once no store holds anything for a load.
    """

    def __init__(self, agree: Agree | None, pin_seconds: float, retired: Callable[[Load], None]) -> None:
        self._agree = agree
        self._pin_seconds = pin_seconds
        self._retired = retired
        self._open: list[Load] = []
        self._retiring: list[Load] = []
        self._pinned: list[tuple[float, Load]] = []
        self._num_requests = self._num_ready = self._num_late = 0
        self._loaded_tokens: dict[str, int] = {}

    # -- counts --------------------------------------------------------------------------------------------------

    @property
    def agrees(self) -> bool:
        """True if ranks end their requests together."""
        return self._agree is not None

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    @property
    def num_batches(self) -> int:
        """Number of look-ups and loads that the stores have not ended."""
        return sum(load.num_batches for load in (*self._open, *self._retiring))

    @property
    def num_leases(self) -> int:
        """Number of leases of the host."""
        return sum(load.num_leases for load in (*self._open, *self._retiring))

    @property
    def num_pins(self) -> int:
        """Number of pins on prefixes of the host."""
        return sum(load.is_pinned for load in set(self._all()))

    def stats(self, stores: dict[str, StoreStats]) -> RequestStats:
        """Return the counters, with those of each store."""
        return RequestStats(
            self._num_requests,
            self._num_ready,
            self._num_late,
            len(self._open),
            len(self._retiring),
            dict(self._loaded_tokens),
            stores,
        )

    def check_invariants(self) -> None:
        """Raise PagecoreError if a request that is over has not been retired."""
        if any(load.is_over for load in self._retiring):
            raise PagecoreError("inconsistent tiers: a request that is over has not been retired")

    # -- progress ------------------------------------------------------------------------------------------------

    def add(self, load: Load) -> Load | None:
        """Add a load; return the older one that it has to wait for because it loads the first missing block."""
        self._num_requests += 1
        leader = self._leader_of(load) if load.request.loads else None  # a look-up waits for no load
        self._open.append(load)
        return leader

    def advance(self, now: float) -> list[Request]:
        """Move every request on; return those that have ended."""
        for load in self._retiring:
            load.publish()  # requests may wait for the last chunks of late ones
        for load in self._open:
            end = load.request.deadline_at
            if end is not None and now >= end:
                load.expire()
        while self._settle_once() and not self.agrees:
            pass
        ended = [load for load in self._open if load.request.has_ended]
        for load in ended:
            self._end(load, now)
        self._retire(now)
        return [load.request for load in ended]

    def cancel_all(self) -> None:
        """Cancel all loads, and end the agreement of ranks."""
        self._agree = None
        for load in (*self._open, *self._retiring):
            load.cancel()

    def release_ended(self) -> None:
        """End the pins of all requests that have ended."""
        for _, load in self._pinned:
            load.release()

    def release_all(self) -> None:
        """End all pins, and forget all loads."""
        for load in self._all():
            load.release()
        for loads in (self._open, self._retiring, self._pinned):
            loads.clear()

    # -- inside --------------------------------------------------------------------------------------------------

    def _all(self) -> list[Load]:
        return [*self._open, *self._retiring, *(load for _, load in self._pinned)]

    def _leader_of(self, load: Load) -> Load | None:
        """Return the newest older load that searches or loads the first block that a load lacks."""
        older = takewhile(lambda one: one is not load, (*self._retiring, *self._open))
        return next((one for one in reversed(list(older)) if not one.is_waiting and load.lacks_what(one)), None)

    def _settle_once(self) -> bool:
        """Settle the stages that can end, on all ranks alike; return True if one did."""
        for load in self._open:
            if load.can_wake:
                load.wake(self._leader_of)
        offers = [load.offer() for load in self._open]
        has_settled = False
        for load, (least, most) in zip(list(self._open), self._agreed(offers), strict=True):
            if least < 0:
                continue
            if least < most:
                load.cap = least  # the ranks offer again: a shorter prefix may not be reusable on all
                continue
            load.settle(least)
            has_settled = True
        return has_settled

    def _agreed(self, offers: Sequence[int | None]) -> list[tuple[int, int]]:
        """Return the least and the largest offer of all ranks for each request; -1 while one has none."""
        if self._agree is None or not offers:
            return [(-1, 1) if offer is None else (offer, offer) for offer in offers]
        own = np.array([(-1, 1) if offer is None else (offer, -offer) for offer in offers], np.int64)
        least = np.asarray(self._agree(own.reshape(-1)), np.int64).reshape(-1, 2)
        return [(low, -high) for low, high in least.tolist()]

    def _end(self, load: Load, now: float) -> None:
        request = load.request
        if load not in self._retiring:  # it is after an interrupt
            self._retiring.append(load)
        self._pinned.append((now + self._pin_seconds, load))
        self._open.remove(load)
        if request.state == "late":
            self._num_late += 1
        else:
            self._num_ready += 1
        for medium, count in request.loaded_tokens.items():
            self._loaded_tokens[medium] = self._loaded_tokens.get(medium, 0) + count

    def _retire(self, now: float) -> None:
        for load in self._retiring:
            load.publish()
            load.request.is_retired = load.is_over
            if load.is_over:
                self._retired(load)
        self._retiring = [load for load in self._retiring if not load.is_over]
        for end, load in self._pinned:
            if now >= end:
                load.release()
        self._pinned = [(end, load) for end, load in self._pinned if load.is_pinned]
