"""Limits of the batches of a guard: the memory that there is for them, and the reasons to refuse or drop them."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.guard.batch import Batch, Kind, Part
from pagecore.tiers.guard.breaker import Breaker
from pagecore.tiers.guard.counters import Counters
from pagecore.tiers.guard.staging import Region, StagingMemory, whole_pages
from pagecore.tiers.store import BlockStore

# A staged load is cut into parts of this share of the staging memory, so that its copies and transfers overlap.
PART_SHARE = 8


class BatchLimits:
    """Base class of `Core`: how much of a batch is admitted, and in which parts a load goes through staging memory."""

    budget_bytes: int
    trailer: int
    breaker: Breaker
    counters: Counters
    staging: StagingMemory | None
    batches: dict[int, Batch]
    waiting: deque[Part]
    store: BlockStore | None

    def _memory_of_store(self, sizes: NDArray[np.uint64]) -> list[Region] | None:
        """Return staging memory for the leading payloads for which there is some; None for a direct store."""
        if self.staging is None:
            return None
        regions: list[Region] = []
        try:
            for nbytes in [] if self.waiting else sizes.tolist():
                region = self.staging.take([nbytes + self.trailer])
                if region is None:
                    break
                regions += region
        except BaseException:
            self.staging.give_all(regions)
            raise
        return regions

    def _admissible(self, kind: Kind, sizes: NDArray[np.uint64], regions: list[Region] | None, count: int) -> int:
        """Return the number of leading keys of a batch for which there is, or will be, memory."""
        if kind in (Kind.LOOKUP, Kind.REMOVE):
            return count
        if regions is not None:
            return len(regions)
        if kind is Kind.STORE:
            used = sum(batch.nbytes for batch in self.batches.values() if batch.kind is Kind.STORE)
            return int(np.searchsorted(used + np.cumsum(sizes), self.budget_bytes, side="right"))
        if self.staging is None:
            return count
        too_large = sizes + np.uint64(self.trailer) > self.staging.nbytes
        return int(too_large.argmax()) if too_large.any() else count

    def _dropped(self, kind: Kind, count: int) -> str:
        if kind is Kind.LOAD:
            return f"{count} loads exceed the staging memory of {self.budget_bytes} bytes; use a larger budget_bytes"
        self.counters.dropped_stores += count
        return f"{count} stores were dropped because the budget of {self.budget_bytes} bytes is in use"

    def _refusal(self, now: float) -> str:
        self.counters.refused_batches += 1
        if self.store is None:
            return "refused: the store is being reopened"
        return f"refused: the circuit breaker is {self.breaker.state(now)}, for {self.breaker.seconds_left(now):.1f} s"

    def _bytes_ahead(self, kind: Kind) -> int:
        """Return the bytes of pending batches that go before a new one: loads before all, stores before stores."""
        counted = {Kind.LOAD: (Kind.LOAD,), Kind.STORE: (Kind.LOAD, Kind.STORE)}.get(kind, ())
        return sum(batch.nbytes for batch in self.batches.values() if batch.kind in counted)

    def _bounds(self, sizes: list[int]) -> list[int]:
        """Cut a load into parts of at most a share of the staging memory, or of one payload."""
        share = self._staging.nbytes // PART_SHARE
        bounds, taken = [0], 0
        for index, nbytes in enumerate(sizes):
            pages = whole_pages(nbytes)
            if taken and taken + pages > share:
                bounds.append(index)
                taken = 0
            taken += pages
        return [*bounds, len(sizes)]

    @property
    def _staging(self) -> StagingMemory:
        assert self.staging is not None
        return self.staging
