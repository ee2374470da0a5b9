"""The parts of a manager that a search and a load use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.manager.policy import PrefixPlanner
from pagecore.tiers.manager.port import HostSide, Positions
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.store import Keys

__all__ = ["Surroundings"]


class Surroundings(Protocol):
    """The parts of a manager that a load uses."""

    host: HostSide
    ports: tuple[StorePort, ...]
    planner: PrefixPlanner
    min_tokens: int
    chunk_bytes: int
    held: Callable[[], AbstractContextManager[object]]

    @property
    def agrees(self) -> bool:
        """True if ranks end their requests together."""

    def device_tokens(self, request: Request, max_tokens: int) -> int:
        """Return the tokens of the request that the device has, up to `max_tokens`."""

    def note_loaded(self, request: Request, start: int, sources: NDArray[np.int64]) -> None:
        """Note the store of each block from token `start` on that was loaded for a request; below 0 for none."""

    def keys(self, request: Request, lane: int, positions: Positions) -> Keys:
        """Return the content keys of entries."""
