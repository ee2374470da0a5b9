"""EmbeddingCache: outputs of encoders by content hash, within a budget of bytes."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pagecore.arrays import as_tensor
from pagecore.errors import InvalidSequence, NotEnoughMemory, UnsupportedDtype
from pagecore.storage.checks import shown
from pagecore.storage.memory.budgets import Memory, parse_memory

Key = bytes | int | str


@dataclass(slots=True)
class _Entry:
    value: Any
    nbytes: int
    num_pins: int = 0


class EmbeddingCache:
    """Arrays by content hash: embeddings of images, audio and prompts, of which the least recently used go first.

    Arrays of any framework are kept as they are, without a copy; the caller does not change them. Calls may come from
    several threads.

    Parameters
    ----------
    max_bytes : int, str or float
        Budget: bytes, "2GiB", or a fraction of the free memory of the host.

    Attributes
    ----------
    max_bytes, nbytes : int
        Budget, and bytes held.
    available_bytes : int
        Bytes that a `put` can take: free ones, and those of entries that are not pinned.
    num_hits, num_misses, num_evictions : int

    Examples
    --------
    >>> import numpy as np
    >>> from pagecore.cache import EmbeddingCache
    >>> cache = EmbeddingCache(10)
    >>> [cache.put(key, np.zeros(4, np.uint8)) for key in "abc"]
    [[], [], ['a']]
    >>> "a" in cache, "c" in cache, cache.nbytes
    (False, True, 8)
    """

    def __init__(self, max_bytes: Memory) -> None:
        self.max_bytes = parse_memory(max_bytes, name="max_bytes")
        self.nbytes = 0
        self.num_hits = self.num_misses = self.num_evictions = 0
        self._entries: OrderedDict[tuple[type, Key], _Entry] = OrderedDict()
        self._pinned_bytes = 0
        self._lock = threading.RLock()

    @property
    def available_bytes(self) -> int:
        """Bytes that a `put` can take."""
        return self.max_bytes - self._pinned_bytes

    def put(self, key: Key, value: Any) -> list[Key]:
        """Keep an array, or a list or tuple of arrays, and drop the least recently used entries that leave no room.

        A key that is there is its content: the entry stays, as the most recently used one.

        Returns
        -------
        list
            Keys of the dropped entries, which other processes may have to drop as well.

        Raises
        ------
        NotEnoughMemory
            The value is larger than the budget, or than what entries in use leave of it; nothing was changed.
        UnsupportedDtype
            A key that is not bytes, an int or a str, or a value that is not an array.
        """
        name, nbytes = _checked(key), _bytes_of(value)
        with self._lock:
            if name in self._entries:
                self._entries.move_to_end(name)
                return []
            if nbytes > self.available_bytes:
                raise NotEnoughMemory(
                    f"the value has {nbytes:,} bytes; the cache holds {self.max_bytes:,}, of which "
                    f"{self._pinned_bytes:,} are in use: make it larger"
                )
            dropped = self._evict(self.nbytes + nbytes - self.max_bytes)
            self._entries[name] = _Entry(value, nbytes)
            self.nbytes += nbytes
            return dropped

    def get(self, key: Key) -> Any:
        """Return the value of a key as the most recently used one, or None; counted as a hit or a miss."""
        name = _checked(key)
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                self.num_misses += 1
                return None
            self.num_hits += 1
            self._entries.move_to_end(name)
            return entry.value

    def pin(self, key: Key) -> Any:
        """Return the value of a key, or None, as `get`; a value that is returned stays until `unpin`."""
        with self._lock:
            value = self.get(key)
            if value is not None:
                entry = self._entries[_checked(key)]
                self._pinned_bytes += 0 if entry.num_pins else entry.nbytes
                entry.num_pins += 1
            return value

    def unpin(self, key: Key) -> None:
        """Undo one `pin`, which makes the entry the most recently used one.

        Raises
        ------
        InvalidSequence
            The key is not pinned.
        """
        name = _checked(key)
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.num_pins:
                raise InvalidSequence(f"key {shown(key)} is not pinned")
            entry.num_pins -= 1
            self._pinned_bytes -= 0 if entry.num_pins else entry.nbytes
            self._entries.move_to_end(name)

    @contextmanager
    def use(self, key: Key) -> Iterator[Any]:
        """Return a context with the value of a key, or None, which stays in the cache until its end."""
        value = self.pin(key)
        try:
            yield value
        finally:
            if value is not None:
                self.unpin(key)

    def clear(self) -> int:
        """Drop all entries that are not pinned; return their bytes."""
        with self._lock:
            before = self.nbytes
            self._evict(math.inf)
            return before - self.nbytes

    def __contains__(self, key: Key) -> bool:
        return _checked(key) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def check_invariants(self) -> None:
        """Recount the bytes; raise AssertionError if they differ or exceed the budget."""
        with self._lock:
            assert self.nbytes == sum(entry.nbytes for entry in self._entries.values()) <= self.max_bytes
            assert all(entry.num_pins >= 0 for entry in self._entries.values())
            assert self._pinned_bytes == sum(entry.nbytes for entry in self._entries.values() if entry.num_pins)

    def _evict(self, nbytes: float) -> list[Key]:
        """Drop entries that are not pinned, least recently used first, until `nbytes` are free; return their keys."""
        freed = 0
        dropped: list[tuple[type, Key]] = []
        for name, entry in self._entries.items():
            if freed >= nbytes:
                break
            if not entry.num_pins:
                freed += entry.nbytes
                dropped.append(name)
        for name in dropped:
            del self._entries[name]
        self.nbytes -= freed
        self.num_evictions += len(dropped)
        return [key for _, key in dropped]

    def __repr__(self) -> str:
        return f"EmbeddingCache({len(self)} entries, {self.nbytes:,} of {self.max_bytes:,} bytes)"


def _checked(key: Key) -> tuple[type, Key]:
    """Return a key with its type: 1 and "1" differ, as do 1 and True, which is refused."""
    if isinstance(key, bool) or not isinstance(key, bytes | int | str):
        raise UnsupportedDtype(f"key is {shown(key)}; expected bytes, an int or a str, such as a digest of the content")
    return type(key), key


def _bytes_of(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_bytes_of(array) for array in value)
    nbytes = getattr(value, "nbytes", None)
    return int(nbytes) if isinstance(nbytes, int) else as_tensor(value).nbytes
