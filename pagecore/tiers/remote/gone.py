"""Record of the entries of a remote store that are known to have gone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

# Most keys of the record.
MAX_KEYS = 1 << 16


class GoneKeys:
    """Keys whose entries have gone since they were last looked up or written. Used by several threads."""

    def __init__(self) -> None:
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._untaken: OrderedDict[bytes, None] = OrderedDict()  # those that `take` has not returned
        self._lock = threading.Lock()

    def note(self, key: bytes) -> None:
        """Note that an entry has gone; the oldest of more than `MAX_KEYS` keys is forgotten."""
        with self._lock:
            for record in (self._gone, self._untaken):
                record[key] = None
                record.move_to_end(key)
                if len(record) > MAX_KEYS:
                    record.popitem(last=False)

    def take(self) -> list[bytes]:
        """Return the keys that have gone since the last call."""
        with self._lock:
            taken, self._untaken = self._untaken, OrderedDict()
            return list(taken)

    def has_gone(self, key: bytes) -> bool:
        """Return True if an entry has gone since it was last expected."""
        return key in self._gone

    def expect(self, keys: Iterable[bytes]) -> None:
        """Note that keys are looked up or written: what was known of them may be false soon."""
        with self._lock:
            for key in keys:
                self._gone.pop(key, None)
