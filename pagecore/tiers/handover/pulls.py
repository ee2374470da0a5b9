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
    """What to pull, and where to.

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

    A pull is *quiet* once nothing writes to the importer's memory any more. It may fail before that: a one-sided read
    whose deadline has passed is quiet when the transport has ended it, at the latest when the transport is closed.

    Parameters
    ----------
    read : callable
        ``read(pull)`` moves the bytes and returns when the pull is quiet. It raises HandoverError.
    """

    def __init__(self, read: Callable[[Pull], None]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self._report: Callable[[BaseException], None] | None = None
        self.is_cancelled = False

    def run(self, report: Callable[[BaseException], None]) -> None:
        """Read until the pull is quiet; call it once, in a thread that may wait.

        Parameters
        ----------
        report : callable
            Called with an error that is known before the pull is quiet.

        Raises
        ------
        HandoverError
            The read failed; the pull is quiet.
        """
        self._report = report
        if self.is_cancelled:
            raise ImportCancelled("the import was cancelled before its first byte")
        try:
            self._read(self)
        except HandoverError as error:
            raise self.cause(error) from None

    def fail(self, error: HandoverError) -> None:
        """Make an error known while the pull is not quiet yet."""
        if self._report is not None:
            self._report(self.cause(error))

    def cause(self, error: HandoverError) -> HandoverError:
        """Return the error that the importer sees: its own cancellation comes first."""
        return ImportCancelled("the import was cancelled") if self.is_cancelled else error

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
