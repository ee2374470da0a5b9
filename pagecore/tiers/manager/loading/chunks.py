"""Chunks of a load: entries of a range of blocks, and the host memory that stores fill with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagecore.tiers.manager.port import Lease, Positions
from pagecore.tiers.manager.tickets import StorePort

__all__ = ["Chunk"]


class Chunk:
    """Entries of a range of blocks, whose batches belong to one or more stores."""

    def __init__(self, end: int, lease: Lease, positions: Sequence[Positions]) -> None:
        self.end = end
        self.lease: Lease | None = lease
        self.positions = positions
        self.ok = [np.zeros(len(lane), np.bool_) for lane in positions]
        self.tickets: list[tuple[StorePort, int | None]] = []
        self.open: set[int] = set()  # indices of stores

    @property
    def num_open(self) -> int:
        """Number of batches that the stores have not ended."""
        return len(self.open)

    @property
    def is_whole(self) -> bool:
        """True if every entry has arrived."""
        return all(bool(lane.all()) for lane in self.ok)

    def cancel(self) -> None:
        """Ask the stores for an early end."""
        for port, ticket in self.tickets:
            port.cancel(ticket)

    def give_back(self) -> None:
        """Give the host memory back, unpublished."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None
