"""The interface through which a step reaches its arrays on a device."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.memory.store import Store
from pagecore.cache.staging.arrays import StepArrays


class StagedPart(Protocol):
    """Device memory of a batch, and the transfers that fill it; `StagedBatch` implements it for CUDA."""

    @property
    def arrays(self) -> StepArrays:
        """The arrays of the batch on the device, at fixed addresses."""

    def send(
        self, copies: Listed[NDArray[np.int32]], stale: Listed[NDArray[np.int32]], store: Store, stream: int
    ) -> None:
        """Send a prepared step and all changes of the block tables; zero and copy blocks. See `StagedBatch.send`."""

    def send_slots(self, tokens: tuple[int, int] = (0, 0), sequences: tuple[int, int] = (0, 0)) -> None:
        """Send the slot mappings and state slots again, with padding for some tokens and sequences [first, last)."""

    def check_reachable(self) -> None:
        """Raise DeviceError if work that is submitted now would be recorded in a graph."""

    def join_stream(self) -> None:
        """Let later work of the cache wait for the pass of the step, if it runs on another stream than the last."""
