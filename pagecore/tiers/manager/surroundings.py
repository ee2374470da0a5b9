"""The parts of a manager that a search and a load use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.manager.policy import PrefixPlanner
from pagecore.tiers.manager.port import Positions, StreamHost
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.store import Keys

__all__ = ["Slots", "Surroundings"]


class Slots:
    """The blocks of a prefix's length that loads may lease at a time, and counts of what has passed through them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.num_blocks = self.num_bytes = 0


class Surroundings(Protocol):
    """The parts of a manager that a load uses."""

    host: StreamHost
    ports: tuple[StorePort, ...]
    planner: PrefixPlanner
    min_tokens: int
    chunk_bytes: int
    slots: Slots
    held: Callable[[], AbstractContextManager[object]]

    @property
    def agrees(self) -> bool:
        """True if ranks end their requests together."""

    def device_tokens(self, request: Request, max_tokens: int) -> int:
        """Return the tokens of the request that the device has, up to `max_tokens`."""

    @property
    def can_stream(self) -> bool:
        """True if prefixes can be loaded through the host to the device."""

    def bring(self, request: Request, max_tokens: int) -> None:
        """Promote what the host has of a request, up to what fits."""

    def note_loaded(
        self, request: Request, start: int, sources: NDArray[np.int64], *, is_streamed: bool = False
    ) -> None:
        """Note the store of each block from token `start` on that was loaded for a request; below 0 for none.

        With `is_streamed` the device has the blocks, otherwise the host.
        """

    def note_found(self, request: Request, num_blocks: int) -> None:
        """Take the blocks from the start of a request that host and stores have in all groups without a window."""

    def keys(self, request: Request, lane: int, positions: Positions) -> Keys:
        """Return the content keys of entries."""
