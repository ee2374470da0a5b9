"""DiskStore: blocks in slab files, by content key."""

from __future__ import annotations

import os
import threading
import weakref
from itertools import count
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import require_int, shown
from pagecore.tiers.disk._io import IoQueue
from pagecore.tiers.disk.batch import split_keys
from pagecore.tiers.disk.folder import checked_folder
from pagecore.tiers.disk.ledger import Ledger
from pagecore.tiers.disk.plan import plan_slabs
from pagecore.tiers.disk.slab_set import SlabSet
from pagecore.tiers.disk.submissions import Submissions
from pagecore.tiers.keys.fingerprint import Fingerprint
from pagecore.tiers.store import KEY_BYTES, Done, Keys, Medium, StoreStats

# Stores that are open in this process; a child of os.fork() closes its copies of their files.
_open_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


class DiskStore(Submissions):
    """Blocks on a local disk; implements `BlockStore`.

    Entries are in slab files of a folder named after the fingerprint, and outlive the process. A payload is written
    first and its entry afterwards, without a sync: the sums of both are verified at every load, so that what a crash
    left incomplete is a miss. When a lane is full, its least recently used entry that no batch uses is replaced; the
    keys of one batch count as used from the last one to the first, so that a prefix is evicted from its end. Any thread
    may call the methods. See docs/disk.md for the format and the behaviour under faults.

    Parameters
    ----------
    folder : str or Path
        Folder of all fingerprints; created if it does not exist. One process at a time uses a fingerprint of it.
    fingerprint : Fingerprint
        Its payload bytes are the sizes of the pieces.
    max_bytes : int or str
        Most bytes of all files, or a size such as "1TiB"; the files are allocated when the folder is opened first.
    max_blocks_per_file : int
        Most entries of one file.
    threads : int
        Requests that the disk sees at once.
    state_ratio : float
        Bytes for states over bytes for tokens, if the fingerprint has both.

    Attributes
    ----------
    medium : "DISK"
    name : str
    fingerprint : Fingerprint
    path : Path
        Folder of the fingerprint.
    num_slots : tuple of int
        Most entries of each lane.
    is_direct : bool
        Every file is open with O_DIRECT.

    Raises
    ------
    ShapeError
        An invalid number.
    NotEnoughMemory
        No room for `max_bytes`, or `max_bytes` does not hold one entry of every lane. No file is left.
    StoreError
        The folder or its files cannot be used, or another store has the folder open.
    UnsupportedOption
        The folder has slabs of other sizes, of another model or layout, or with damaged superblocks.

    Notes
    -----
    Self-describing slabs with dense tables follow the stores of databases; the need for sums and for a table that is
    read at once follows LMCache's disk backends (issues 562 to 4778).
    """

    medium: Medium = "DISK"
    reports_evictions = True
    can_remove = True
    can_list = True
    can_touch = True
    keeps_prefixes = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        fingerprint: Fingerprint,
        max_bytes: int | str,
        max_blocks_per_file: int = 32_000,
        threads: int = 8,
        state_ratio: SupportsFloat = 0.9,
    ) -> None:
        if not isinstance(fingerprint, Fingerprint):
            raise UnsupportedOption(f"fingerprint is {shown(fingerprint)}; give Fingerprint.of(cache, model=...)")
        plan = plan_slabs(fingerprint, max_bytes, max_blocks_per_file, state_ratio)
        self.fingerprint = fingerprint
        self.path = checked_folder(folder) / fingerprint.name
        self.name = f"disk {self.path}"
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._tickets = count(1)
        self._queue = self._new_queue(require_int("threads", threads, max=256))
        try:
            self._slabs = SlabSet(self.path, plan, self._queue)
        except BaseException:
            self._queue.close()
            raise
        self._lanes = self._slabs.lanes
        self._sequence = self._slabs.newest + 1
        self._ledger = Ledger(self._slabs, fingerprint.payload_bytes)
        self.num_slots = tuple(lane.num_slots for lane in self._lanes)
        self.is_direct = self._slabs.is_direct
        self._is_closed = False
        _open_stores.add(self)

    def _new_queue(self, threads: int) -> IoQueue:
        """Return the queue of the store; a test overrides this to inject faults."""
        return IoQueue(threads)

    def fileno(self) -> int:
        """Return an eventfd that is readable while `poll` has something to return; -1 after `close`."""
        return -1 if self._is_foreign() else self._queue.fileno()

    def cancel(self, ticket: int) -> None:
        """End the transfers of a batch that have not started; its `Done` comes all the same."""
        if self._is_usable() and 0 < ticket < 1 << 64:
            self._queue.cancel(ticket)

    def poll(self) -> list[Done]:
        """Return the batches that ended since the last call, in the order of their ends.

        Raises nothing but MemoryError of Python's own objects; the next call returns the batches then.
        """
        if self._is_foreign():
            return []
        turn = self._turn()
        with self._lock, turn:
            try:
                self._ledger.collect(self._queue)
                return self._ledger.take_ready()
            except BaseException:
                self._queue.signal()  # for the next call
                raise

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending; return False if `timeout` seconds pass first. `poll` returns the batches."""
        if not self._queue.drain(timeout):
            return False
        if not self._is_foreign():
            turn = self._turn()
            with self._lock, turn:
                self._collect()
        return True

    def close(self) -> None:
        """Cancel all batches, wait for running transfers, and close the files; `poll` returns the last batches.

        The order of last uses is written to the folder, so that the next store goes on from it.
        """
        if self._is_foreign():
            return
        turn = self._turn()
        with self._lock, turn:
            is_first, self._is_closed = not self._is_closed, True
            try:
                if is_first:
                    self._queue.close()
                    self._ledger.collect(self._queue)
                    for lane in self._lanes:
                        for key in list(lane.held.elements()):
                            lane.unhold(key)
                    self._slabs.flush()
                    self._slabs.record_uses(self._sequence - 1)
            finally:  # the folder is free after an interrupt, too
                self._queue.close()
                self._slabs.close()
            _open_stores.discard(self)

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> StoreStats:
        """Return the counters."""
        if self._is_foreign():
            return StoreStats()
        turn = self._turn()
        with self._lock, turn:
            held = sum(lane.held.total() for lane in self._lanes)
            return self._ledger.stats(held)

    @property
    def num_entries(self) -> int:
        """Number of published entries of all lanes."""
        return sum(len(lane.entries) for lane in self._lanes)

    def take_evicted(self) -> Keys:
        """Return the keys of entries that were replaced, or found damaged, since the last call; none in a fork."""
        if self._is_foreign():
            return np.empty((0, KEY_BYTES), np.uint8)
        turn = self._turn()
        with self._lock, turn:
            evicted = b"".join(key for lane in self._lanes for key in lane.take_evicted())
        return np.frombuffer(evicted, np.uint8).reshape(-1, KEY_BYTES)

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Return True for each key whose entry is there; nothing is held, and nothing counts as used.

        In a child of `os.fork` no entry is there.
        """
        wanted = split_keys(keys, self.fingerprint)
        if self._is_foreign():
            return np.zeros(len(wanted), np.bool_)
        turn = self._turn()
        with self._lock, turn:
            return np.array([key in self._lanes[key[-1]].entries for key in wanted], np.bool_)

    def keys(self) -> Keys:
        """Return the keys of all published entries, uint8 ``[n, 17]``, lane after lane; empty after `close` or a fork.

        Nothing is held, and nothing counts as used. `submit_remove` of them empties the store.
        """
        if self._is_foreign():
            return np.empty((0, KEY_BYTES), np.uint8)
        turn = self._turn()
        with self._lock, turn:
            listed = [] if self._is_closed else [key for lane in self._lanes for key in lane.entries]
        return np.frombuffer(b"".join(listed), np.uint8).reshape(-1, KEY_BYTES).copy()

    def check_invariants(self) -> None:
        """Raise PagecoreError if slots, pins and batches do not match; does nothing in a fork."""
        if self._is_foreign():
            return
        turn = self._turn()
        with self._lock, turn:
            for lane in self._lanes:
                lane.check_invariants()
            if not self._is_closed:
                self._queue.check_invariants()
            self._slabs.check_invariants()

    def __del__(self) -> None:
        if getattr(self, "_is_closed", True) is False:
            self.close()

    def _forget_files(self) -> None:
        """Close the descriptors that a child of fork() inherited; its parent keeps its own."""
        self._slabs.close()
        os.close(self._queue.fileno())


def _after_fork() -> None:
    for store in list(_open_stores):
        store._forget_files()
    _open_stores.clear()


os.register_at_fork(after_in_child=_after_fork)
