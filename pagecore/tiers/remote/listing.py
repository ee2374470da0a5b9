"""Entries of a store that others have deleted, found by comparing what is known with a listing of what is there.

known        found or stored by a batch that has ended
a listing    reports the known entries that it lacks, except those that a batch has touched since it began:
             they may have been written after the listing passed their names
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.arguments import checked_keys
from pagecore.tiers.remote.gone import GoneKeys
from pagecore.tiers.store import KEY_BYTES, Keys

# Most entries that are compared with a listing.
MAX_KNOWN = 1 << 20


class ListedEntries:
    """The entries that a store is known to have, and those that listings have missed. Used by several threads.

    Attributes
    ----------
    gone : GoneKeys
    """

    def __init__(self) -> None:
        self.gone = GoneKeys()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._touched: set[bytes] = set()  # since the listing began
        self._is_listing = False
        self._lock = threading.Lock()

    def expect(self, keys: Iterable[bytes]) -> None:
        """Note that a batch with some keys begins."""
        keys = list(keys)
        self.gone.expect(keys)
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
            if self._is_listing:
                self._touched.update(keys)

    def note(self, keys: Iterable[bytes]) -> None:
        """Note the keys of a batch whose entries are there; the oldest of more than `MAX_KNOWN` are forgotten."""
        with self._lock:
            for key in keys:
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def known(self) -> list[bytes]:
        """Return the known keys."""
        with self._lock:
            return list(self._known)

    def begin(self, among: Iterable[bytes] | None = None) -> set[bytes]:
        """Begin a listing, of all names or `among` some; return the known keys that it should have."""
        with self._lock:
            self._touched.clear()
            self._is_listing = True
            return set(self._known) if among is None else {key for key in among if key in self._known}

    def end(self, missing: Iterable[bytes]) -> None:
        """End a listing that lacks some of the keys; an incomplete one lacks none."""
        with self._lock:
            self._is_listing = False
            lost = [key for key in missing if key not in self._touched and key in self._known]
            for key in lost:
                del self._known[key]
        for key in lost:
            self.gone.note(key)


class ListingReporter:
    """The part of a store that reports what its listings miss; implements `EvictionReporter`."""

    # None without listings.
    _listed: ListedEntries | None = None

    @property
    def reports_evictions(self) -> bool:
        """True with `list_seconds`."""
        return self._listed is not None

    def take_evicted(self) -> Keys:
        """Return the keys of entries that listings have missed since the last call."""
        taken = [] if self._listed is None else self._listed.gone.take()
        return np.frombuffer(b"".join(taken), np.uint8).reshape(-1, KEY_BYTES)

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Return False for each key that a listing has missed since it was asked for, or written, last."""
        listed = self._listed
        names = [key.tobytes() for key in checked_keys(keys)]
        return np.array([listed is None or not listed.gone.has_gone(name) for name in names], np.bool_)
