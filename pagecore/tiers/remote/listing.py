"""Entries of an object store that others have deleted, found by comparing what is known with a listing.

known        found or stored by a batch that has ended
a listing    reports the known entries that it lacks, except those that a batch has touched since it began:
             they may have been written after the listing passed their names
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from pagecore.tiers.remote.gone import GoneKeys

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

    def begin(self) -> set[bytes]:
        """Begin a listing; return the keys that it should have."""
        with self._lock:
            self._touched.clear()
            self._is_listing = True
            return set(self._known)

    def end(self, missing: Iterable[bytes]) -> None:
        """End a listing that lacks some of the keys; an incomplete one lacks none."""
        with self._lock:
            self._is_listing = False
            lost = [key for key in missing if key not in self._touched and key in self._known]
            for key in lost:
                del self._known[key]
        for key in lost:
            self.gone.note(key)
