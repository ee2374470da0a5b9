"""The protocol of block stores: places outside the process that keep blocks by content key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Medium = Literal["CPU", "DISK", "EXTERNAL"]
# Bytes of a content key: 16 of the hash, and one for the group.
KEY_BYTES = 17
Keys = NDArray[np.uint8]
Pieces = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Done:
    """The end of one submitted batch.

    Attributes
    ----------
    ticket : int
        Number that the submission returned.
    ok : ndarray of bool
        ``[n]``, one for each key: for a lookup, the entry is there and is held; for a load, all bytes are in the
        caller's memory and verified; for a store, the entry is published.
    error : str or None
        Reason if a key failed for another reason than absence.
    is_full : bool
        The store works: it only had no room for the entries that failed, or did not remove those that another batch is
        writing. A `Guard` does not count that as a failure.
    """

    ticket: int
    ok: NDArray[np.bool_]
    error: str | None = None
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of a store since it was opened; batches that were dropped count as failures of all their keys.

    An entry that was there already counts as stored. Its bytes count, too, except in a `DiskStore`, which counts those
    that it writes.
    """

    num_lookups: int = 0
    num_found: int = 0
    num_loaded: int = 0
    num_load_failures: int = 0
    num_stored: int = 0
    num_store_failures: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    num_pending: int = 0
    num_held: int = 0
    num_removed: int = 0


@runtime_checkable
class EvictionReporter(Protocol):
    """The part of a store that can say which entries it has evicted; optional, for events.

    Attributes
    ----------
    reports_evictions : bool
        False if the methods know nothing.
    """

    @property
    def reports_evictions(self) -> bool:
        """True if the store reports its evictions."""

    def take_evicted(self) -> Keys:
        """Return the keys of entries that the store has evicted since the last call and does not have again.

        The first call begins the record, which is bounded: the oldest keys are forgotten.
        """

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Return False for each key whose entry is known to have gone; nothing is held."""


@runtime_checkable
class EntryRemover(Protocol):
    """The part of a store that deletes entries on request; optional, for `Tiers.evict_prefix`.

    Attributes
    ----------
    can_remove : bool
        False if `submit_remove` deletes nothing.
    """

    @property
    def can_remove(self) -> bool:
        """True if the store deletes entries on request."""

    def submit_remove(self, keys: Keys) -> int:
        """Delete entries; `ok` is True for keys that have no entry afterwards.

        A batch of this process that is storing an entry has to end first, or the entry may stay.
        """


@runtime_checkable
class EntryLister(Protocol):
    """The part of a store that lists its entries; optional, for `Tiers.clear`.

    Attributes
    ----------
    can_list : bool
        False if `keys` does not know the entries.
    """

    @property
    def can_list(self) -> bool:
        """True if the store lists its entries."""

    def keys(self) -> Keys:
        """Return the keys of all published entries, in any order; nothing is held, and nothing counts as used."""


@runtime_checkable
class EntryTaker(Protocol):
    """The part of a store that says whether it takes entries; optional, every other store does.

    Attributes
    ----------
    takes_entries : bool
        False if `submit_store` stores nothing, so that no entry need be kept for it.
    """

    @property
    def takes_entries(self) -> bool:
        """True if the store takes entries."""


@runtime_checkable
class EntryToucher(Protocol):
    """The part of a store whose order of eviction counts what was used elsewhere, in a nearer tier; optional.

    Attributes
    ----------
    can_touch : bool
        False if `touch` does nothing.
    """

    @property
    def can_touch(self) -> bool:
        """True if the store counts uses that are reported."""

    def touch(self, keys: Keys) -> None:
        """Count entries as used now, from the last key to the first; keys without an entry are ignored."""


@runtime_checkable
class PrefixKeeper(Protocol):
    """The part of a store that evicts a prefix from its end, whatever was used last; optional.

    Attributes
    ----------
    keeps_prefixes : bool
        False if `submit_store` accepts no `before`.
    """

    @property
    def keeps_prefixes(self) -> bool:
        """True if the store keeps the order of prefixes."""

    def submit_store(self, keys: Keys, pieces: Pieces, *, before: Keys | None = None) -> int:
        """Write entries, as `BlockStore.submit_store`.

        With `before`, the keys are a part of one prefix: each follows the last key of its lane, and the first of a lane
        follows that of `before`, which has one key of a lane at most. An entry is not stored without the one that it
        follows, and is evicted before it.
        """


@runtime_checkable
class BlockStore(Protocol):
    """A place that keeps blocks by content key.

    All methods return at once. A submission ends with exactly one `Done`, which `poll` returns; until then its pieces
    belong to the store. Keys are uint8 ``[n, 17]``; pieces are uint64 ``[n, 2]``: address and bytes of one block each,
    4,096-aligned addresses in memory of the caller.

    Attributes
    ----------
    medium : {"CPU", "DISK", "EXTERNAL"}
    name : str
        Name for statistics and messages, such as "disk" or "s3://bucket/prefix".
    """

    medium: Medium
    name: str

    def fileno(self) -> int:
        """Return an eventfd that is readable while `poll` has something to return."""

    def submit_lookup(self, keys: Keys) -> int:
        """Ask for the entries of `keys`; those found are held until they are loaded or unlocked."""

    def submit_load(self, keys: Keys, pieces: Pieces) -> int:
        """Read entries into `pieces`; the hold of each key ends with the batch."""

    def submit_store(self, keys: Keys, pieces: Pieces) -> int:
        """Write entries from `pieces`; an entry that exists already counts as stored."""

    def unlock(self, keys: Keys) -> None:
        """Release the holds of a lookup; keys without a hold are ignored."""

    def cancel(self, ticket: int) -> None:
        """Ask for an early end of a batch; its `Done` comes all the same. A ticket that has ended is ignored."""

    def poll(self) -> list[Done]:
        """Return the batches that ended since the last call, in the order of their ends; never raises."""

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending; return False if `timeout` seconds pass first."""

    def close(self) -> None:
        """End all batches and release the store's threads, descriptors and memory; a second call does nothing."""

    def stats(self) -> StoreStats:
        """Return the counters."""
