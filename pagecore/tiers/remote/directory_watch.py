"""Entries that others remove from a Mooncake cluster, found by asking its directory for those that are known."""

from __future__ import annotations

import threading

from pagecore.tiers.remote.listing import ListedEntries
from pagecore.tiers.remote.master import Directory
from pagecore.tiers.resources import start_thread

# Entries of one request, and the shortest pause between two in seconds: at most 12,800 entries a second.
KEYS_PER_REQUEST = 256
SHORTEST_PAUSE = 0.02


class DirectoryWatch:
    """A thread that asks for every known entry once in a while, and reports those that have gone.

    The requests of a round are spread over its time. An answer that fails says nothing.

    Parameters
    ----------
    directory : Directory
        The thread closes it; so does a constructor that raises.
    listed : ListedEntries
    prefix : str
        Beginning of the names of entries; the content key in hexadecimal follows.
    seconds : float
        Time of a round; a round of many entries takes longer.

    Raises
    ------
    DeviceError
        The system has no thread left.
    """

    def __init__(self, directory: Directory, listed: ListedEntries, prefix: str, seconds: float) -> None:
        self._directory, self._listed = directory, listed
        self._prefix, self._seconds = prefix, seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagecore mooncake directory", daemon=True)
        try:
            start_thread(self._thread, "MooncakeStore", "list_seconds")
        except BaseException:
            self._closing.set()
            self._directory.close()
            raise

    def close(self) -> None:
        """End the thread and its connection; a request that runs ends early."""
        self._closing.set()
        while self._thread.is_alive():
            self._directory.abort()  # again, if the thread was about to connect
            self._thread.join(0.05)

    def _run(self) -> None:
        while not self._closing.is_set():
            keys = self._listed.known()
            starts = range(0, max(1, len(keys)), KEYS_PER_REQUEST)
            pause = max(SHORTEST_PAUSE, self._seconds / len(starts))
            for start in starts:
                if self._closing.wait(pause):
                    break
                self._ask(keys[start : start + KEYS_PER_REQUEST])
        self._directory.close()

    def _ask(self, keys: list[bytes]) -> None:
        names = {self._prefix + key.hex(): key for key in self._listed.begin(keys)}
        gone: list[bytes] = []
        try:
            if names:
                gone = [names[name] for name in self._directory.absent(list(names))]
        except Exception:
            pass  # an answer that fails says nothing
        finally:
            self._listed.end(gone)
