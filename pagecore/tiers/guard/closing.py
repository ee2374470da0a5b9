"""Stores that are being closed, each by a thread of its own: that may take as long as a server hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pagecore.tiers.store import BlockStore

# Seconds for which a guard waits for stores that may write late. Its staging memory stays until they are closed.
CLOSE_SECONDS = 10.0


def close_limit() -> float:
    """Return the monotonic time up to which a guard that is closed now waits for such stores."""
    return time.monotonic() + CLOSE_SECONDS


class ClosingStore:
    """A store that a daemon thread closes, or the calling thread if the system has no other left.

    Parameters
    ----------
    store : BlockStore
    closed : callable
        ``closed(self, store)`` is called in the thread once the store is closed, also if `close` raised; it sets
        `is_closed`.

    Attributes
    ----------
    is_closed : bool
        True if no transfer of the store runs any more, and its memory was taken back.
    """

    def __init__(self, store: BlockStore, closed: Callable[[ClosingStore, BlockStore], None]) -> None:
        self._closed = closed
        self._writes_late = bool(getattr(store, "writes_late", False))
        self._error: Exception | None = None
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, args=(store,), name=f"closing {store.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._run(store)

    def wait(self, limit: float) -> None:
        """Wait until the store is closed, up to the time `limit` for one that may write late; raise its error."""
        if self._thread.is_alive():
            seconds = max(0.0, limit - time.monotonic())
            self._thread.join(seconds if self._writes_late else None)
        if self._error is not None:
            raise self._error

    def _run(self, store: BlockStore) -> None:
        try:
            store.close()
        except Exception as error:
            self._error = error
        self._closed(self, store)
