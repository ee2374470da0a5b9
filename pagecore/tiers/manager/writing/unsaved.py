"""Entries that a store has failed to take, which are written again when their prefix is used again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from pagecore.tiers.manager.port import Flags
from pagecore.tiers.store import Keys

__all__ = ["Unsaved"]

MAX_KEYS = 1 << 16
# A store that is away or full is not asked at every use.
PAUSE_SECONDS = 5.0


class Unsaved:
    """The entries that one store has not taken, the newest `max_keys` of them, and when it failed.

    The host goes on to serve such a prefix, so that no backup would write it again: without this, other processes would
    not find it, nor anything that continues it, until the host has evicted it.

    Parameters
    ----------
    clock : callable
        Returns the time in seconds.
    max_keys : int
        Entries beyond this number are forgotten, the oldest first.
    """

    def __init__(self, clock: Callable[[], float], max_keys: int = MAX_KEYS) -> None:
        self._clock, self._max_keys = clock, max_keys
        self._failed: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failed)

    def note(self, keys: Keys, ok: Flags) -> None:
        """Note which entries of a batch the store has taken, and which it has not."""
        if self._failed:
            for key in keys[ok]:
                self._failed.pop(key.tobytes(), None)
        now = self._clock()
        for key in keys[~ok]:
            name = key.tobytes()
            self._failed[name] = now
            self._failed.move_to_end(name)
        while len(self._failed) > self._max_keys:
            self._failed.popitem(last=False)

    def due(self, keys: Keys) -> Flags:
        """Return True for each entry that failed, and that may be written again now."""
        latest = self._clock() - PAUSE_SECONDS
        never = np.inf
        return np.array([self._failed.get(key.tobytes(), never) <= latest for key in keys], np.bool_)
