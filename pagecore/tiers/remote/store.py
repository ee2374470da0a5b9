"""Base of remote stores: arguments, tickets, counters, and the names of entries."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol, Self, SupportsFloat, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import ShapeError, StoreError, UnsupportedOption
from pagecore.storage.checks import as_float, shown
from pagecore.tiers.arguments import checked_keys, checked_pieces
from pagecore.tiers.completions import Completions
from pagecore.tiers.resources import descriptors
from pagecore.tiers.store import Done, Keys, Medium, Pieces, StoreStats

Kind = Literal["lookup", "load", "store", "remove"]
# Shortest and longest timeout in seconds. Sockets round to microseconds, and treat zero as no limit.
TIMEOUTS = 0.001, 1e6


@runtime_checkable
class Identity(Protocol):
    """The parts of a `Fingerprint` that remote stores use."""

    @property
    def name(self) -> str:
        """Prefix of the entries."""

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Bytes of an entry, a lane each."""


def checked_identity(fingerprint: Identity) -> Identity:
    """Return a fingerprint; raise UnsupportedOption for an object without its parts."""
    if not isinstance(fingerprint, Identity):
        raise UnsupportedOption(f"fingerprint is {shown(fingerprint)}; give Fingerprint.of(cache, model=...)")
    return fingerprint


def checked_timeout(timeout: SupportsFloat, name: str = "timeout") -> float:
    """Return seconds; raise ShapeError unless they are within `TIMEOUTS`."""
    seconds = as_float(name, timeout)
    shortest, longest = TIMEOUTS
    if not shortest <= seconds <= longest:
        raise ShapeError(f"{name} is {seconds}; give seconds from {shortest} to {longest:.0f}")
    return seconds


class Full(str):
    """Reason of keys that a store had no room for, or did not remove while they are written, although it works."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class Batch:
    """One submission until its `Done`."""

    ticket: int
    kind: Kind
    keys: Keys
    pieces: Pieces
    ok: NDArray[np.bool_]
    error: str | None = None
    is_full: bool = False
    is_cancelled: bool = False

    def note(self, reason: str | None) -> None:
        """Note the reason of failed keys; the first one stays."""
        if reason is not None:
            self.is_full = isinstance(reason, Full) and (self.is_full or self.error is None)
            self.error = self.error or reason


class RemoteStore(ABC):
    """Base of the stores in this package. A subclass starts and stops batches, and ends each with `_end`.

    Remote stores hold nothing: an entry that a lookup found may be gone when it is loaded, which is a miss. They verify
    each payload, and write to the caller's memory only until the `Done`.
    """

    medium: Medium = "EXTERNAL"
    verifies = True
    writes_late = False
    can_remove = True

    def __init__(self, name: str, fingerprint: Identity) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self._payload_bytes = np.array(fingerprint.payload_bytes, np.uint64)
        with descriptors(name):
            self._completions = Completions()
        self._batches: dict[int, Batch] = {}
        self._counts: Counter[str] = Counter()
        self._is_closed = False
        self._changed = threading.Condition(threading.RLock())
        self._closer = threading.RLock()  # one call of `close` at a time

    # ---- for subclasses ----

    @abstractmethod
    def _start(self, batch: Batch) -> None:
        """Start a batch; the caller holds `_changed`."""

    @abstractmethod
    def _stop(self, batch: Batch) -> None:
        """End a batch as soon as no thread touches its pieces; the caller holds `_changed`."""

    @abstractmethod
    def _release(self) -> None:
        """End the threads and connections; all batches were stopped. It may be called again after an interrupt."""

    def _end(self, batch: Batch) -> None:
        """Report a batch, once."""
        with self._changed:
            if self._batches.pop(batch.ticket, None) is None:
                return
            self._counts[batch.kind] += len(batch.ok)
            self._counts[f"{batch.kind} ok"] += int(batch.ok.sum())
            self._counts[f"{batch.kind} bytes"] += int(batch.pieces[batch.ok[: len(batch.pieces)], 1].sum())
        self._completions.end(batch.ticket, batch.ok, batch.error, is_full=batch.is_full)

    # ---- BlockStore ----

    def fileno(self) -> int:
        """Return an eventfd that is readable while `poll` has something to return."""
        return self._completions.fileno()

    def submit_lookup(self, keys: Keys) -> int:
        """Ask for the entries of `keys`; a remote store holds none of them."""
        keys = checked_keys(keys)
        self._sizes(keys)
        return self._submit("lookup", keys, np.zeros((0, 2), np.uint64))

    def submit_load(self, keys: Keys, pieces: Pieces) -> int:
        """Read entries into `pieces`."""
        keys = checked_keys(keys)
        return self._submit("load", keys, self._checked_pieces(keys, pieces))

    def submit_store(self, keys: Keys, pieces: Pieces) -> int:
        """Write entries from `pieces`; an entry that exists already counts as stored."""
        keys = checked_keys(keys)
        return self._submit("store", keys, self._checked_pieces(keys, pieces))

    def submit_remove(self, keys: Keys) -> int:
        """Delete entries; one that does not exist counts as deleted."""
        keys = checked_keys(keys)
        self._sizes(keys)
        return self._submit("remove", keys, np.zeros((0, 2), np.uint64))

    def unlock(self, keys: Keys) -> None:
        """Do nothing: a remote store holds no entries."""
        checked_keys(keys)

    def cancel(self, ticket: int) -> None:
        """Ask for an early end of a batch."""
        with self._changed:
            batch = self._batches.get(ticket)
            if batch is not None and not batch.is_cancelled:
                batch.is_cancelled = True
                batch.error = batch.error or "cancelled"
                self._stop(batch)

    def poll(self) -> list[Done]:
        """Return the batches that ended since the last call."""
        return self._completions.take()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending; return False if `timeout` seconds pass first."""
        return self._completions.wait(timeout)

    def close(self) -> None:
        """End all batches and release threads and connections; after an interrupt a second call does the rest."""
        with self._closer:
            with self._changed:
                self._is_closed = True
                for ticket in list(self._batches):
                    self.cancel(ticket)
                self._changed.notify_all()
            if self._completions.fileno() >= 0:
                self._release()
            for batch in list(self._batches.values()):
                self._end(batch)
            self._completions.close()

    def stats(self) -> StoreStats:
        """Return the counters."""
        with self._changed:
            counts = self._counts
            return StoreStats(
                num_lookups=counts["lookup"],
                num_found=counts["lookup ok"],
                num_loaded=counts["load ok"],
                num_load_failures=counts["load"] - counts["load ok"],
                num_stored=counts["store ok"],
                num_store_failures=counts["store"] - counts["store ok"],
                bytes_loaded=counts["load bytes"],
                bytes_stored=counts["store bytes"],
                num_pending=self._completions.num_pending,
                num_removed=counts["remove ok"],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inner ----

    def _submit(self, kind: Kind, keys: Keys, pieces: Pieces) -> int:
        with self._changed:
            if self._is_closed:
                raise StoreError(f"the store {self.name} is closed; open a new one")
            batch = Batch(self._completions.open(), kind, keys, pieces, np.zeros(len(keys), bool))
            self._batches[batch.ticket] = batch
            if len(keys):
                self._start(batch)
            else:
                self._end(batch)
            return batch.ticket

    def _sizes(self, keys: Keys) -> NDArray[np.uint64]:
        """Return the bytes of the entry of each key."""
        lanes = keys[:, -1]
        if len(lanes) and int(lanes.max()) >= len(self._payload_bytes):
            raise ShapeError(
                f"keys name lane {int(lanes.max())}, but the fingerprint has {len(self._payload_bytes)} lanes; use the "
                "fingerprint that made the keys"
            )
        return self._payload_bytes[lanes]

    def _checked_pieces(self, keys: Keys, pieces: Pieces) -> Pieces:
        pieces = checked_pieces(pieces, len(keys))
        wrong = pieces[:, 1] != self._sizes(keys)
        if wrong.any():
            index = int(wrong.argmax())
            raise ShapeError(
                f"pieces[{index}] has {int(pieces[index, 1])} bytes; an entry of lane {int(keys[index, -1])} has "
                f"{int(self._sizes(keys)[index])} bytes by the fingerprint; use the pieces of that cache's HostPool"
            )
        return pieces
