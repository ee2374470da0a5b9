"""Optional parts of a guarded store: what its guard passes on of the protocols beyond `BlockStore`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import StoreError
from pagecore.tiers.arguments import checked_keys
from pagecore.tiers.guard.core import Core
from pagecore.tiers.store import (
    KEY_BYTES,
    EntryLister,
    EntryRemover,
    EntryTaker,
    EntryToucher,
    Keys,
    PrefixKeeper,
)


class StoreAbilities:
    """The part of `Guard` that asks whether the store removes, lists, touches, links and reports entries."""

    _core: Core
    name: str

    @property
    def read_only(self) -> bool:
        """True if the guard stores and removes nothing."""
        return self._core.read_only

    @property
    def takes_entries(self) -> bool:
        """False if the guard is read-only or the store takes no entries, so that `Tiers` writes none."""
        store: object = self._core.store
        return not self._core.read_only and (not isinstance(store, EntryTaker) or store.takes_entries)

    @property
    def keeps_prefixes(self) -> bool:
        """True if the store evicts a prefix from its end."""
        store: object = self._core.store
        return isinstance(store, PrefixKeeper) and store.keeps_prefixes

    @property
    def can_remove(self) -> bool:
        """True if the store deletes entries on request."""
        store: object = self._core.store
        return not self._core.read_only and isinstance(store, EntryRemover) and store.can_remove

    @property
    def can_list(self) -> bool:
        """True if the store lists its entries."""
        store: object = self._core.store
        return isinstance(store, EntryLister) and store.can_list

    def keys(self) -> Keys:
        """Return the keys of all entries of a store that lists them, and none of another.

        Raises
        ------
        StoreError
            The guard has no client: it is being reopened, or the guard is closed.
        """
        store: object = self._core.store
        if store is None:
            raise StoreError(f"the store {self.name} is being reopened or was closed; list its entries later")
        if isinstance(store, EntryLister) and store.can_list:
            return store.keys()
        return np.empty((0, KEY_BYTES), np.uint8)

    @property
    def can_touch(self) -> bool:
        """True if the store counts uses that are reported."""
        store: object = self._core.store
        return isinstance(store, EntryToucher) and store.can_touch

    def touch(self, keys: Keys) -> None:
        """Count entries as used now, from the last key to the first."""
        store: object = self._core.store
        if isinstance(store, EntryToucher) and store.can_touch:
            store.touch(checked_keys(keys))

    @property
    def reports_evictions(self) -> bool:
        """True if the store reports its evictions."""
        reporter = self._core.reporter
        return reporter is not None and reporter.reports_evictions

    def take_evicted(self) -> Keys:
        """Return the keys of entries that the store has evicted since the last call."""
        reporter = self._core.reporter
        return np.empty((0, KEY_BYTES), np.uint8) if reporter is None else reporter.take_evicted()

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Return True for each key whose entry the store has now; for all of them if it cannot say."""
        reporter = self._core.reporter
        return np.ones(len(keys), np.bool_) if reporter is None else reporter.has(keys)
