"""Counters of a guard."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.tiers.guard.batch import Batch, Kind
from pagecore.tiers.store import StoreStats


@dataclass(slots=True)
class Counters:
    """Counters since the guard was made; all of them in keys, bytes or batches as their names say."""

    num_lookups: int = 0
    num_found: int = 0
    num_loaded: int = 0
    num_load_failures: int = 0
    num_stored: int = 0
    num_store_failures: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    refused_batches: int = 0
    late_batches: int = 0
    dropped_stores: int = 0
    failed_sums: int = 0
    num_reopened: int = 0
    num_removed: int = 0

    def count(self, batch: Batch) -> None:
        """Count a batch that ended."""
        total, succeeded = len(batch.ok), int(batch.ok.sum())
        nbytes = int(batch.sizes[batch.ok[: len(batch.sizes)]].sum())
        if batch.kind is Kind.LOOKUP:
            self.num_lookups += total
            self.num_found += succeeded
        elif batch.kind is Kind.LOAD:
            self.num_loaded += succeeded
            self.num_load_failures += total - succeeded
            self.bytes_loaded += nbytes
        elif batch.kind is Kind.REMOVE:
            self.num_removed += succeeded
        else:
            self.num_stored += succeeded
            self.num_store_failures += total - succeeded
            self.bytes_stored += nbytes

    def stats(self, num_pending: int, num_held: int) -> StoreStats:
        """Return the counters that every store has."""
        return StoreStats(
            self.num_lookups,
            self.num_found,
            self.num_loaded,
            self.num_load_failures,
            self.num_stored,
            self.num_store_failures,
            self.bytes_loaded,
            self.bytes_stored,
            num_pending,
            num_held,
            self.num_removed,
        )
