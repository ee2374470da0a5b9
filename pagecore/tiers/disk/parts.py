"""Parts of a disk store, its lock, and the recovery of its index from an interrupt."""

from __future__ import annotations

import os
import threading

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

    def _turn(self) -> Turn:
        """Return the turn of a call, which begins under the lock: ``with self._lock, turn:``."""
        return Turn(self, self._lock._is_owned())  # type: ignore[attr-defined]

    def _recover(self) -> None:
        """Let the pins and slots of each lane be those of the batches, and the holds those of whole lookups."""
        if self._lookup is not None:
            batch, held = self._lookup
            self._ledger.withdraw(batch)
            for key, number in held.items():
                self._lanes[key[-1]].held[key] = number
        self._ledger.recover()
        for lane, (pins, written) in zip(self._lanes, self._ledger.list_users(), strict=True):
            lane.recover(pins, written)
        self._lookup = None

    def _submission(self) -> Submission:
        """Return the turn of a call that submits a batch; raise UnsupportedOption in a fork."""
        if self._is_foreign():
            raise UnsupportedOption(
                f"{self.name} was opened by process {self._pid}, of which this one is a fork; open a store of its own"
            )
        return Submission(self, self._lock._is_owned())  # type: ignore[attr-defined]

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


class Turn:
    """The work of one call under the lock of a store; it recovers from an interrupt of an earlier call.

    It does not take the lock: an interrupt within a context manager of Python would leave the lock held, as long as the
    exception is kept.
    """

    def __init__(self, store: StoreParts, is_nested: bool) -> None:
        self._store = store
        self._is_nested = is_nested  # within another call of this thread: in a signal handler or a destructor
        self._outer = store._lookup if is_nested else None

    def __enter__(self) -> None:
        if self._store._is_torn and not self._is_nested:
            self._store._recover()
        self._store._is_torn = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._store._lookup = self._outer
            self._store._is_torn = self._is_nested


class Submission(Turn):
    """The turn of a call that submits a batch; the eventfd stays readable while there is something to poll."""

    def __enter__(self) -> None:
        if self._store._is_closed:
            raise UnsupportedOption(f"{self._store.name} is closed; open it again")
        super().__enter__()
        try:
            self._store._collect()
        except Exception as error:
            super().__exit__(type(error))
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._store._ledger.has_ready:
                self._store._queue.signal()
        except BaseException as error:
            super().__exit__(type(error))
            raise
        super().__exit__(kind)
