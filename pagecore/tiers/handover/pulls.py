"""Pulls: reads of an export that are under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.handover.errors import HandoverError, ImportCancelled
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.pieces import Units
from pagecore.tiers.handover.wire import Claim


@dataclass(frozen=True)
class PullRequest:
    """Memory to pull into, and the claim that names its bytes.

    Attributes
    ----------
    manifest : Manifest
    claim : Claim
    units : Units
        Memory of the importer, in the order of the claim.
    seeds : ndarray
        Seed of each unit's sum.
    deadline : int
        Nanoseconds of `time.monotonic_ns`.
    """

    manifest: Manifest
    claim: Claim
    units: Units
    seeds: NDArray[np.uint64]
    deadline: int


class Pull:
    """One read of an export.

    When `run` has ended, nothing writes to the importer's memory any more.

    Parameters
    ----------
    read : callable
        ``read(pull)`` moves the bytes. It raises HandoverError if it fails.
    forget : callable
        ``forget(pull)`` is called when the pull has ended.
    """

    def __init__(self, read: Callable[[Pull], None], forget: Callable[[Pull], None]) -> None:
        self._read, self._forget = read, forget
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self.is_cancelled = False
        self.is_complete = False

    def run(self) -> None:
        """Read to the end; call it once, in a thread that may wait."""
        try:
            self.check()
            self._read(self)
            self.is_complete = True
        except HandoverError as error:
            self.check()  # an own cancellation comes first
            raise error
        finally:
            self._forget(self)

    def check(self) -> None:
        """Raise ImportCancelled if the pull was cancelled."""
        if self.is_cancelled:
            raise ImportCancelled("the import was cancelled")

    def interrupt_with(self, interrupt: Callable[[], None] | None) -> None:
        """Set what ends a blocked read early, from another thread."""
        with self._lock:
            self._interrupt = interrupt
            must = interrupt if self.is_cancelled else None
        if must is not None:
            must()

    def cancel(self) -> None:
        """Ask for an early end."""
        with self._lock:
            self.is_cancelled = True
            interrupt = self._interrupt
        if interrupt is not None:
            interrupt()
