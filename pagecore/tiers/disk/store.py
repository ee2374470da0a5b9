"""DiskStore: blocks in slab files, by content key."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import require_int, shown
from pagecore.tiers.disk._io import IoQueue, SlabTable
from pagecore.tiers.disk.batch import NOT_TAKEN, Batch, split_before, split_keys, split_pieces
from pagecore.tiers.disk.folder import checked_folder
from pagecore.tiers.disk.ledger import Ledger
from pagecore.tiers.disk.plan import plan_slabs
from pagecore.tiers.disk.slab_set import SlabSet
from pagecore.tiers.keys.fingerprint import Fingerprint
from pagecore.tiers.store import KEY_BYTES, Done, Keys, Medium, Pieces, StoreStats

Operation = tuple[SlabTable, int, bytes, int, int]

# Stores that are open in this process; a child of os.fork() closes its copies of their files.
_open_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


class DiskStore:
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

    def submit_lookup(self, keys: Keys) -> int:
        """Hold the entries of `keys` that are there; return a ticket. The batch ends at once.

        Parameters
        ----------
        keys : ndarray of uint8
            ``[n, 17]``.

        Raises
        ------
        ShapeError
            Keys of another shape or lane.
        UnsupportedOption
            The store is closed, or belongs to the parent of this process.
        """
        wanted = split_keys(keys, self.fingerprint)
        with self._entered():
            batch = Batch(next(self._tickets), wanted, "lookup", [False] * len(wanted))
            try:
                for i, key in enumerate(wanted):
                    batch.ok[i] = self._lanes[key[-1]].hold(key)
                return self._ledger.end(batch)
            except BaseException:
                self._ledger.give_back(batch)
                raise

    def submit_load(self, keys: Keys, pieces: Pieces) -> int:
        """Read entries into memory and verify them; return a ticket.

        Parameters
        ----------
        keys : ndarray of uint8
            ``[n, 17]``; their holds end with the batch.
        pieces : ndarray of uint64
            ``[n, 2]``, address and bytes; the memory belongs to the store until the batch ends. A piece whose key fails
            has undefined contents.

        Raises
        ------
        ShapeError
            Keys or pieces of another shape, lane or size, or memory that is not aligned to 4,096 bytes.
        UnsupportedOption
            The store is closed, or belongs to the parent of this process.
        """
        wanted = split_keys(keys, self.fingerprint)
        targets = split_pieces(pieces, wanted, self.fingerprint)
        with self._entered():
            batch = Batch(next(self._tickets), wanted, "load", [False] * len(wanted))
            operations: list[Operation] = []
            try:
                for i, key in enumerate(wanted):
                    lane = self._lanes[key[-1]]
                    if key not in lane.entries:
                        lane.unhold(key)
                        continue
                    batch.places.append(NOT_TAKEN)
                    slot = lane.pin_for_load(key)
                    batch.places[-1] = i
                    assert slot is not None
                    operations.append((*self._slabs.place(key[-1], slot), key, *targets[i]))
                _end_first(batch, operations)
                if not operations:
                    return self._ledger.end(batch)
                return self._sent(batch, partial(self._queue.submit_load, batch.ticket, operations))
            except BaseException:
                self._undo(batch, operations)
                raise

    def submit_store(self, keys: Keys, pieces: Pieces, *, before: Keys | None = None) -> int:
        """Write entries; return a ticket.

        Parameters
        ----------
        keys : ndarray of uint8
            ``[n, 17]``. An entry that is there already is not written; one that another batch is writing shares that
            batch's result.
        pieces : ndarray of uint64
            ``[n, 2]``, address and bytes; the memory must not change until the batch ends.
        before : ndarray of uint8, optional
            ``[m, 17]``: the keys are a part of one prefix, and `before` has the entry before the first of each lane, if
            there is one. An entry is then evicted before the one that it follows, also when the folder is opened again,
            and is not stored without it. States follow nothing.

        Raises
        ------
        ShapeError
            Keys or pieces of another shape, lane or size, or memory that is not aligned to 4,096 bytes.
        UnsupportedOption
            The store is closed, or belongs to the parent of this process.
        """
        wanted = split_keys(keys, self.fingerprint)
        sources = split_pieces(pieces, wanted, self.fingerprint)
        links = split_before(wanted, before, self.fingerprint)
        with self._entered():
            batch = Batch(next(self._tickets), wanted, "store", [False] * len(wanted))
            operations: list[Operation] = []
            shared: list[tuple[bytes, int]] = []
            try:
                self._pin_present(batch)
                for i, key in enumerate(wanted):
                    lane = self._lanes[key[-1]]
                    if key in lane.entries:
                        batch.ok[i] = True
                    elif key in lane.writing:
                        shared.append((key, i))
                    else:
                        batch.places.append(i)
                        slot = lane.take(key, links[i])
                        if slot is None:
                            del batch.places[-1]
                            batch.full = batch.full or f"lane {key[-1]} has no slot that may be evicted for an entry"
                        else:
                            operations.append((*self._slabs.place(key[-1], slot), key, *sources[i]))
                _end_first(batch, operations)
                if not operations and not shared:
                    return self._ledger.end(batch)
                batch.num_shared = len(shared)
                previous = [links[i] for i in batch.places]
                submit = partial(self._queue.submit_store, batch.ticket, operations, self._sequence, previous)
                self._sequence += len(operations)
                return self._sent(batch, submit if operations else None, shared)
            except BaseException:
                self._undo(batch, operations)
                raise

    def submit_remove(self, keys: Keys) -> int:
        """Delete entries, held ones too; return a ticket.

        Loads that run still end with the right bytes. What a crash leaves of a removal may be found again.

        Parameters
        ----------
        keys : ndarray of uint8
            ``[n, 17]``. A key without an entry counts as removed; one that another batch is writing fails.

        Raises
        ------
        ShapeError
            Keys of another shape or lane.
        UnsupportedOption
            The store is closed, or belongs to the parent of this process.
        """
        wanted = split_keys(keys, self.fingerprint)
        with self._entered():
            batch = Batch(next(self._tickets), wanted, "remove", [False] * len(wanted))
            erased: list[tuple[SlabTable, int]] = []
            try:
                for i, key in enumerate(wanted):
                    lane = self._lanes[key[-1]]
                    if key in lane.entries:
                        batch.places.append(NOT_TAKEN)
                        slot = lane.remove(key)
                        batch.places[-1] = i
                        assert slot is not None
                        erased.append(self._slabs.place(key[-1], slot))
                    elif key in lane.writing:
                        batch.full = "another batch is writing an entry; wait for its end"
                    else:
                        batch.ok[i] = True
                if not erased:
                    return self._ledger.end(batch)
                return self._sent(batch, partial(self._queue.submit_erase, batch.ticket, erased))
            except BaseException:
                self._undo(batch, erased)
                raise

    def unlock(self, keys: Keys) -> None:
        """Release the holds of a lookup; keys without a hold are ignored."""
        wanted = split_keys(keys, self.fingerprint)
        if self._is_usable():
            with self._lock:
                for key in reversed(wanted):
                    self._lanes[key[-1]].unhold(key)

    def touch(self, keys: Keys) -> None:
        """Count entries as used now, from the last key to the first; keys without an entry are ignored.

        `Tiers` reports what sequences have used from the device or the host, so that it is not evicted before what
        follows it.
        """
        wanted = split_keys(keys, self.fingerprint)
        if self._is_usable():
            with self._lock:
                for key in reversed(wanted):
                    self._lanes[key[-1]].touch(key)

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
        with self._lock:
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
            with self._lock:
                self._collect()
        return True

    def close(self) -> None:
        """Cancel all batches, wait for running transfers, and close the files; `poll` returns the last batches.

        The order of last uses is written to the folder, so that the next store goes on from it.
        """
        if self._is_foreign():
            return
        with self._lock:
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
        with self._lock:
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
        with self._lock:
            evicted = b"".join(key for lane in self._lanes for key in lane.take_evicted())
        return np.frombuffer(evicted, np.uint8).reshape(-1, KEY_BYTES)

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Return True for each key whose entry is there; nothing is held, and nothing counts as used.

        In a child of `os.fork` no entry is there.
        """
        wanted = split_keys(keys, self.fingerprint)
        if self._is_foreign():
            return np.zeros(len(wanted), np.bool_)
        with self._lock:
            return np.array([key in self._lanes[key[-1]].entries for key in wanted], np.bool_)

    def keys(self) -> Keys:
        """Return the keys of all published entries, uint8 ``[n, 17]``, lane after lane; empty after `close` or a fork.

        Nothing is held, and nothing counts as used. `submit_remove` of them empties the store.
        """
        if self._is_foreign():
            return np.empty((0, KEY_BYTES), np.uint8)
        with self._lock:
            listed = [] if self._is_closed else [key for lane in self._lanes for key in lane.entries]
        return np.frombuffer(b"".join(listed), np.uint8).reshape(-1, KEY_BYTES).copy()

    def check_invariants(self) -> None:
        """Raise PagecoreError if slots, pins and batches do not match; does nothing in a fork."""
        if self._is_foreign():
            return
        with self._lock:
            for lane in self._lanes:
                lane.check_invariants()
            if not self._is_closed:
                self._queue.check_invariants()
            self._slabs.check_invariants()

    def __del__(self) -> None:
        if getattr(self, "_is_closed", True) is False:
            self.close()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Take the lock of a store that can be used, and keep the eventfd readable while there is something to poll."""
        if self._is_foreign():
            raise UnsupportedOption(
                f"{self.name} was opened by process {self._pid}, of which this one is a fork; open a store of its own"
            )
        with self._lock:
            if self._is_closed:
                raise UnsupportedOption(f"{self.name} is closed; open it again")
            self._collect()
            try:
                yield
            finally:
                if self._ledger.has_ready:
                    self._queue.signal()

    def _collect(self) -> None:
        """Take what the queue has ended into account, and let the eventfd say whether there is something to poll."""
        try:
            self._ledger.collect(self._queue)
        finally:
            if self._ledger.has_ready:
                self._queue.signal()

    def _pin_present(self, batch: Batch) -> None:
        """Pin the keys of a store that are there already, until the batch ends."""
        for key in batch.keys:
            lane = self._lanes[key[-1]]
            if key in lane.entries:
                batch.present.append(b"")
                lane.pin(key)
                batch.present[-1] = key

    def _sent(self, batch: Batch, submit: Callable[[], object] | None, shared: Iterable[tuple[bytes, int]] = ()) -> int:
        """Add a batch to the ledger and hand its transfers to the queue; return its ticket."""
        self._ledger.begin(batch, shared)
        if submit is not None:
            submit()
        return batch.ticket

    def _undo(self, batch: Batch, operations: Sized) -> None:
        """Give back what a batch has taken, unless the queue has it, which has emptied `operations` then."""
        if not (self._ledger.is_pending(batch) and batch.places and not operations):
            self._ledger.give_back(batch)

    def _is_foreign(self) -> bool:
        return os.getpid() != self._pid

    def _is_usable(self) -> bool:
        return not (self._is_foreign() or self._is_closed)

    def _forget_files(self) -> None:
        """Close the descriptors that a child of fork() inherited; its parent keeps its own."""
        self._slabs.close()
        os.close(self._queue.fileno())


def _end_first(batch: Batch, operations: list[Operation]) -> None:
    """Reverse the transfers of a batch, so that the first keys, the beginning of a prefix, are used last.

    Eviction then takes a prefix from its end, as a prefix tree does.
    """
    batch.places.reverse()
    operations.reverse()


def _after_fork() -> None:
    for store in list(_open_stores):
        store._forget_files()
    _open_stores.clear()


os.register_at_fork(after_in_child=_after_fork)
