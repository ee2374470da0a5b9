"""Parts of a disk store, its lock, and the recovery of its index from an interrupt."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pagecore.errors import UnsupportedOption
from pagecore.tiers.disk._io import IoQueue
from pagecore.tiers.disk.batch import Batch
from pagecore.tiers.disk.lane import Lane
from pagecore.tiers.disk.ledger import Ledger
from pagecore.tiers.disk.slab_set import SlabSet
from pagecore.tiers.keys.fingerprint import Fingerprint


class StoreParts:
    """Base class of `DiskStore`: its parts, and their use by one thread at a time.

    An interrupt may end any statement. `_is_torn` is True from the first statement under the lock to the last: if it is
    when the lock is taken, the index is made consistent with the batches first.
    """

    name: str
    fingerprint: Fingerprint
    _pid: int
    _lock: threading.RLock
    _queue: IoQueue
    _slabs: SlabSet
    _lanes: list[Lane]
    _ledger: Ledger
    _is_closed: bool
    _is_torn = False
    # The lookup that runs, and the holds of its keys before it.
    _lookup: tuple[Batch, dict[bytes, int]] | None = None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Take the lock, and recover from an interrupt of an earlier call."""
        is_nested = self._lock._is_owned()  # type: ignore[attr-defined]  # by code of the caller that ran meanwhile
        with self._lock:
            if self._is_torn and not is_nested:
                self._recover()
            self._is_torn = True
            try:
                yield
            except Exception:
                self._is_torn = is_nested
                raise
            self._is_torn = is_nested

    def _recover(self) -> None:
        """Let the pins and slots of each lane be those of the batches, and the holds those of the lookups."""
        if self._lookup is not None:
            batch, held = self._lookup
            if not self._ledger.has_result(batch):
                for key, number in held.items():
                    self._lanes[key[-1]].held[key] = number
        self._ledger.recover()
        for lane, (pins, written) in zip(self._lanes, self._ledger.list_users(), strict=True):
            lane.recover(pins, written)
        self._lookup = None

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Take the lock of a store that can be used, and keep the eventfd readable while there is something to poll."""
        if self._is_foreign():
            raise UnsupportedOption(
                f"{self.name} was opened by process {self._pid}, of which this one is a fork; open a store of its own"
            )
        with self._locked():
            if self._is_closed:
                raise UnsupportedOption(f"{self.name} is closed; open it again")
            self._collect()
            try:
                yield
            finally:
                if self._ledger.has_ready:
                    self._queue.signal()

    def _collect(self) -> None:
        """Take what the queue has ended into account, and let the eventfd say whether there is something to poll."""
        try:
            self._ledger.collect(self._queue)
        finally:
            if self._ledger.has_ready:
                self._queue.signal()

    def _is_foreign(self) -> bool:
        return os.getpid() != self._pid

    def _is_usable(self) -> bool:
        return not (self._is_foreign() or self._is_closed)
