"""A block store without bytes: the keys of a store of a given size, for replays that only count."""

from __future__ import annotations

import os
from threading import Lock

import numpy as np

from pagecore.tiers.disk.batch import split_before
from pagecore.tiers.disk.order import EvictionOrder
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.store import Done, Keys, Medium, Pieces, StoreStats

__all__ = ["SimulatedStore"]


class SimulatedStore:
    """Implementation of `BlockStore` that remembers keys and sizes, and reads and writes no memory.

    Every batch ends at once. When the store is full, the entries used least recently make room; held ones stay. As in a
    `DiskStore`, a batch uses its keys from the last to the first and evicts none of them. With a fingerprint the store
    keeps prefixes, as `PrefixKeeper` describes.

    Parameters
    ----------
    medium : {"DISK", "EXTERNAL"}
    max_bytes : int or None
        Capacity; None for an unbounded store.
    fingerprint : Fingerprint, optional
    """

    can_touch = True

    def __init__(self, medium: Medium, max_bytes: int | None = None, fingerprint: Fingerprint | None = None) -> None:
        self.keeps_prefixes = fingerprint is not None
        self._fingerprint = fingerprint
        self.medium: Medium = medium
        self.name = f"simulated {medium.lower()}"
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: dict[bytes, int] = {}
        self._order = EvictionOrder((), {})  # of the entries that are not held
        self._holds: dict[bytes, int] = {}
        self._ended: list[Done] = []
        self._num_tickets = 0
        self._counts = dict.fromkeys(
            ("lookups", "found", "loaded", "failed", "stored", "dropped", "read", "written"), 0
        )
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = Lock()

    def fileno(self) -> int:
        """Return the eventfd."""
        return self._event

    def submit_lookup(self, keys: Keys) -> int:
        """Look keys up, and hold those that are there."""
        with self._lock:
            ok = np.zeros(len(keys), np.bool_)
            for index, key in enumerate(_packed(keys)):
                if key in self._entries:
                    ok[index] = True
                    self._holds[key] = self._holds.get(key, 0) + 1
                    self._order.discard(key)
            self._counts["lookups"] += len(ok)
            self._counts["found"] += int(ok.sum())
            return self._end(ok)

    def submit_load(self, keys: Keys, pieces: Pieces) -> int:
        """Count the bytes of entries that are there."""
        with self._lock:
            ok = np.zeros(len(keys), np.bool_)
            packed = _packed(keys)
            for index, key in enumerate(packed):
                ok[index] = key in self._entries
                self._unhold(key)
            self._use(packed)
            self._counts["loaded"] += int(ok.sum())
            self._counts["failed"] += int((~ok).sum())
            self._counts["read"] += int(pieces[ok, 1].sum())
            return self._end(ok)

    def submit_store(self, keys: Keys, pieces: Pieces, *, before: Keys | None = None) -> int:
        """Remember keys; an entry for which there is no room is dropped."""
        with self._lock:
            ok = np.zeros(len(keys), np.bool_)
            packed = _packed(keys)
            links: list[bytes | None] = [None] * len(packed)
            if self._fingerprint is not None:
                links = split_before(packed, before, self._fingerprint)
            for key in packed:
                self._order.discard(key)
            for index, (key, nbytes) in enumerate(zip(packed, pieces[:, 1].tolist(), strict=True)):
                ok[index] = key in self._entries or self._add(key, nbytes, links[index])
            self._use(packed)
            self._counts["stored"] += int(ok.sum())
            self._counts["dropped"] += int((~ok).sum())
            return self._end(ok)

    def touch(self, keys: Keys) -> None:
        """Count entries as used now, from the last key to the first."""
        with self._lock:
            self._use(_packed(keys))

    def unlock(self, keys: Keys) -> None:
        """Release holds."""
        with self._lock:
            for key in reversed(_packed(keys)):
                self._unhold(key)

    def cancel(self, ticket: int) -> None:
        """Do nothing: every batch has ended."""

    def poll(self) -> list[Done]:
        """Return the batches since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
            if ended and self._event >= 0:
                os.eventfd_read(self._event)
            return ended

    def drain(self, timeout: float | None = None) -> bool:  # noqa: ARG002 - nothing is ever pending
        """Return True."""
        return True

    def close(self) -> None:
        """Forget everything; a second call does nothing."""
        with self._lock:
            self._entries.clear()
            self._holds.clear()
            if self._event >= 0:
                os.close(self._event)
                self._event = -1

    def stats(self) -> StoreStats:
        """Return the counters."""
        counts = self._counts
        return StoreStats(
            num_lookups=counts["lookups"],
            num_found=counts["found"],
            num_loaded=counts["loaded"],
            num_load_failures=counts["failed"],
            num_stored=counts["stored"],
            num_store_failures=counts["dropped"],
            bytes_loaded=counts["read"],
            bytes_stored=counts["written"],
            num_held=sum(self._holds.values()),
        )

    def _use(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self._entries and key not in self._holds:
                self._order.use(key)

    def _add(self, key: bytes, nbytes: int, before: bytes | None) -> bool:
        if before is not None:
            if before not in self._entries:
                return False
            self._order.link(key, before)
        while self.max_bytes is not None and self.nbytes + nbytes > self.max_bytes:
            oldest = self._order.pop()
            if oldest is None:
                self._order.unlink(key)
                return False
            self.nbytes -= self._entries.pop(oldest)
        self._entries[key] = nbytes
        self.nbytes += nbytes
        self._counts["written"] += nbytes
        return True

    def _unhold(self, key: bytes) -> None:
        left = self._holds.get(key, 0) - 1
        if left > 0:
            self._holds[key] = left
        elif self._holds.pop(key, None) is not None:
            self._order.use(key)

    def _end(self, ok: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
        self._num_tickets += 1
        self._ended.append(Done(self._num_tickets, ok))
        os.eventfd_write(self._event, 1)
        return self._num_tickets


def _packed(keys: Keys) -> list[bytes]:
    """Return keys as bytes."""
    width = keys.shape[1]
    data = np.ascontiguousarray(keys).tobytes()
    return [data[begin : begin + width] for begin in range(0, len(data), width)]
