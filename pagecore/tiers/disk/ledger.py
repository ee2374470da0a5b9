"""The batches of a disk store that have not ended, and the effect of each end on the index."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable

from pagecore.tiers.disk.batch import Batch
from pagecore.tiers.disk.slab_set import SlabSet
from pagecore.tiers.store import Done, StoreStats


class Ledger:
    """Pending batches, ended batches that the caller has not polled, and counters.

    Parameters
    ----------
    slabs : SlabSet
    payload_bytes : tuple of int
        Bytes of an entry of each lane.
    """

    def __init__(self, slabs: SlabSet, payload_bytes: tuple[int, ...]) -> None:
        self._slabs = slabs
        self._lanes = slabs.lanes
        self._payload_bytes = payload_bytes
        self._pending: dict[int, Batch] = {}
        # Batches that store a key which another batch is writing, and the place of the key in them.
        self._waiting: dict[bytes, list[tuple[Batch, int]]] = {}
        self._ready: list[Done] = []
        self._counts: Counter[str] = Counter()

    @property
    def has_ready(self) -> bool:
        """True if a batch has ended that `take_ready` has not returned."""
        return bool(self._ready)

    def take_ready(self) -> list[Done]:
        """Return the batches that ended since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def begin(self, batch: Batch, shared: Iterable[tuple[bytes, int]] = ()) -> None:
        """Add a pending batch; `shared` are keys that other batches write, and their places."""
        self._pending[batch.ticket] = batch
        for key, place in shared:
            self._waiting.setdefault(key, []).append((batch, place))

    def forget(self, batch: Batch) -> None:
        """Remove a batch that the queue refused."""
        del self._pending[batch.ticket]
        self._unpin_present(batch)
        for key, waiting in list(self._waiting.items()):
            self._waiting[key] = [(other, place) for other, place in waiting if other is not batch]

    def end(self, batch: Batch) -> int:
        """End a batch; return its ticket."""
        self._unpin_present(batch)
        self._ready.append(batch.done())
        num_ok = sum(batch.ok)
        if batch.kind == "lookup":
            self._counts["num_lookups"] += len(batch.ok)
            self._counts["num_found"] += num_ok
        elif batch.kind == "remove":
            self._counts["num_removed"] += num_ok
        else:
            self._counts["num_loaded" if batch.kind == "load" else "num_stored"] += num_ok
            self._counts[f"num_{batch.kind}_failures"] += len(batch.ok) - num_ok
        return batch.ticket

    def collect(self, ended: Iterable[tuple[int, list[int]]]) -> None:
        """Publish, free or drop the entries of batches that the queue has ended, and end the batches."""
        for ticket, errors in ended:
            batch = self._pending[ticket]
            settle = {"load": self._end_load, "remove": self._end_remove}.get(batch.kind, self._end_store)
            for place, error in zip(batch.places, errors, strict=True):
                settle(batch, place, error)
            self._end_parts(batch, len(errors))

    def stats(self, num_held: int) -> StoreStats:
        """Return the counters."""
        return StoreStats(**self._counts, num_pending=len(self._pending), num_held=num_held)

    def _unpin_present(self, batch: Batch) -> None:
        for key in reversed(batch.present):
            self._lanes[key[-1]].unpin(key)

    def _end_load(self, batch: Batch, place: int, error: int) -> None:
        key = batch.keys[place]
        lane = self._lanes[key[-1]]
        _settle(batch, place, error)
        if error == 0:
            self._counts["bytes_loaded"] += self._payload_bytes[key[-1]]
        elif error != errno.ECANCELED and (slot := lane.drop(key)) is not None:
            table, local = self._slabs.place(key[-1], slot)
            table.clear(local)
        lane.unpin(key)

    def _end_remove(self, batch: Batch, place: int, error: int) -> None:
        key = batch.keys[place]
        _settle(batch, place, error)
        self._lanes[key[-1]].unpin(key)

    def _end_store(self, batch: Batch, place: int, error: int) -> None:
        key = batch.keys[place]
        lane = self._lanes[key[-1]]
        _settle(batch, place, error)
        if error == 0:
            lane.publish(key)
            self._counts["bytes_stored"] += self._payload_bytes[key[-1]]
        else:
            lane.abandon(key)
        for other, where in self._waiting.pop(key, ()):
            _settle(other, where, error)
            self._end_parts(other, 1)

    def _end_parts(self, batch: Batch, num_parts: int) -> None:
        batch.num_awaited -= num_parts
        if batch.num_awaited == 0:
            del self._pending[batch.ticket]
            self.end(batch)


def _settle(batch: Batch, place: int, error: int) -> None:
    """Record the result of one key."""
    batch.ok[place] = error == 0
    if error:
        batch.fail(_reason_of(error))


def _reason_of(error: int) -> str:
    """Return the text of an errno of the queue."""
    if error == errno.ECANCELED:
        return "cancelled"
    return "the sum of a payload differs" if error == errno.EBADMSG else os.strerror(error)
