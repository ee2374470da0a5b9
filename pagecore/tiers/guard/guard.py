"""Guard around any store of blocks."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import numpy as np

from pagecore.errors import StoreError, UnsupportedOption
from pagecore.storage.checks import flag, require_int, shown
from pagecore.tiers.arguments import checked_keys, checked_pieces, checked_store
from pagecore.tiers.guard.abilities import StoreAbilities
from pagecore.tiers.guard.batch import Kind, Part, run
from pagecore.tiers.guard.breaker import Breaker
from pagecore.tiers.guard.closing import ClosingStore, close_limit
from pagecore.tiers.guard.core import Core
from pagecore.tiers.guard.deadline import Deadline
from pagecore.tiers.guard.health import GuardHealth, health_of
from pagecore.tiers.resources import descriptors, start_thread
from pagecore.tiers.store import BlockStore, Done, Keys, Medium, Pieces, StoreStats

# Most seconds of one sleep of the thread: `select.poll` takes no more than 2^31 - 1 ms.
LONGEST_SLEEP = 3600.0
# Most refused clients that are being closed at a time, each by a thread: one may hang as long as its server does.
MAX_REFUSED = 4


class Guard(StoreAbilities):
    """A store of blocks with a deadline, verified payloads, a circuit breaker and a memory budget.

    A store keeps the contract of `BlockStore` by itself if its class attributes `verifies` and `writes_late` are absent
    or True and False: the guard hands it the caller's pieces. Otherwise payloads go through staging memory of
    `budget_bytes`: with a frame of length and sum after them where the store does not verify, and so that a transfer
    that was abandoned writes to staging memory at most. The lost part of that memory comes back when the store ends the
    transfer; where `writes_late`, when it ended without an error, or when the client was closed.

    Parameters
    ----------
    store : BlockStore
        The guard owns it, and closes it.
    deadline : Deadline
        Time limit of each batch. A late batch ends with `ok` False for keys without their bytes: at once if payloads
        are staged, else when the store ends the cancelled batch.
    budget_bytes : int
        Size of the staging memory, or limit of the bytes of pending stores for a store that needs none. Stores for
        which there is no memory are dropped; loads wait for it.
    breaker : Breaker or None
        None is a breaker of 3 failures, with pauses of 1 s doubling to 60 s. Late batches, errors and failed sums are
        failures; misses, dropped stores and cancelled batches are not.
    reopen : callable, optional
        Makes a new client after the guard closed the one that lost memory. Without it the memory stays lost.
    read_only : bool
        If True, the guard stores and removes nothing: the entries are those that other processes write. `Tiers` reads
        such a store, and writes nothing to it. A store that finds a damaged entry by itself still deletes it.
    clock : callable
        Monotonic seconds.

    Attributes
    ----------
    takes_entries, can_remove : bool
        Whether entries are stored, and deleted on request: False for a read-only guard, else as the store says.

    Raises
    ------
    ShapeError
        `budget_bytes` is not a positive integer.
    UnsupportedOption
        `store` is not a `BlockStore`, has a medium that none has, or is closed; another argument is of another kind.
    DeviceError
        The process has no file descriptor or thread left. The store stays with the caller.
    """

    verifies = True
    writes_late = False

    def __init__(
        self,
        store: BlockStore,
        *,
        deadline: Deadline | None = None,
        budget_bytes: int = 256 << 20,
        breaker: Breaker | None = None,
        reopen: Callable[[], BlockStore] | None = None,
        read_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        store = checked_store("store", store)
        _check_parts(deadline, breaker, reopen, clock)
        budget_bytes = require_int("budget_bytes", budget_bytes, max=None)
        read_only = flag("read_only", read_only)
        self.medium: Medium = store.medium
        self.name: str = store.name
        self._core = Core(
            store,
            deadline=deadline or Deadline(),
            budget_bytes=budget_bytes,
            breaker=breaker or Breaker(),
            read_only=read_only,
        )
        self._reopen = reopen
        self._clock = clock
        self._lock = threading.Lock()
        self._closer = threading.RLock()  # one call of `close` at a time
        self._is_closing = True  # until it has the store
        self._is_closed = False
        self._closing: list[ClosingStore] = []
        self._refused: list[ClosingStore] = []
        self._thread = threading.Thread(target=self._run, name=f"guard of {self.name}", daemon=True)
        with ExitStack() as made:  # what was made goes again if the guard cannot start; the caller keeps the store
            made.callback(self._core.release)
            with descriptors(self.name):
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._wake)
            made.callback(self._stop)
            with self._lock:
                start_thread(self._thread, self.name, "its guard")
                self._core.adopt(store)  # last: the store keeps the memory that is registered with it
                self._is_closing = False
            made.pop_all()

    # ---- BlockStore ----

    def fileno(self) -> int:
        """Return an eventfd that is readable while `poll` has something to return."""
        return self._core.completions.fileno()

    def submit_lookup(self, keys: Keys) -> int:
        """Ask for the entries of `keys`; those found are held until they are loaded or unlocked."""
        return self._submit(Kind.LOOKUP, checked_keys(keys), None)

    def submit_load(self, keys: Keys, pieces: Pieces) -> int:
        """Read entries into `pieces`; the hold of each key ends with the batch."""
        keys = checked_keys(keys)
        return self._submit(Kind.LOAD, keys, checked_pieces(pieces, len(keys)))

    def submit_store(self, keys: Keys, pieces: Pieces, *, before: Keys | None = None) -> int:
        """Write entries from `pieces`, or drop those for which the budget has no memory.

        The batch fails if it has `before` and the store does not keep prefixes, or if the guard is read-only.
        """
        keys = checked_keys(keys)
        before = None if before is None else checked_keys(before)
        return self._submit(Kind.STORE, keys, checked_pieces(pieces, len(keys)), before)

    def submit_remove(self, keys: Keys) -> int:
        """Delete entries; the batch fails if the store has no `submit_remove`, or if the guard is read-only."""
        return self._submit(Kind.REMOVE, checked_keys(keys), None)

    def unlock(self, keys: Keys) -> None:
        """Release the holds of a lookup."""
        keys = checked_keys(keys)
        with self._lock:
            self._core.unlock(keys)

    def cancel(self, ticket: int) -> None:
        """End a batch early; its `Done` comes all the same."""
        with self._lock:
            self._core.cancel(ticket, self._clock())
            self._wake_thread()

    def poll(self) -> list[Done]:
        """Return the batches that ended since the last call."""
        with self._lock:
            if not self._is_closed:
                self._core.advance(self._clock())
                self._wake_thread()
            return self._core.completions.take()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending; return False if `timeout` seconds pass first."""
        return self._core.completions.wait(timeout)

    def close(self) -> None:
        """End all batches, close the store and release the guard's thread and memory.

        A store that may write late and does not close within 10 s is left to a thread, which also keeps the staging
        memory until then.
        """
        with self._closer:
            self._stop()
            if self._is_closed:
                return
            while (job := self._core.take_job()) is not None:
                self._copy(job)
            with self._lock:
                store = self._core.abandon("the guard was closed", self._clock())
                self._is_closed = True
            self._close_parts(store)

    def _close_parts(self, store: BlockStore | None) -> None:
        """Close the store and everything else, whatever the store raises."""
        with ExitStack() as parts:
            parts.callback(os.close, self._wake)
            parts.callback(self._core.completions.close)
            if self._core.staging is not None:
                parts.callback(self._close_staging)
            if store is not None:
                self._closing.append(ClosingStore(store, self._destroyed))
            limit = close_limit()
            for each in self._closing:
                parts.callback(each.wait, limit)

    def _close_staging(self) -> None:
        """Unmap the staging memory, unless a transfer of a store that does not close may still write to it."""
        if self._core.staging is not None and all(each.is_closed for each in self._closing):
            self._core.staging.close()

    def _destroyed(self, closing: ClosingStore, store: BlockStore) -> None:
        """Take the memory of a store back that is closed; runs in the thread that closed it."""
        with self._lock:
            self._core.destroyed(store, self._clock())
            closing.is_closed = True
            if not self._is_closing:
                os.eventfd_write(self._wake, 1)

    def stats(self) -> StoreStats:
        """Return the counters of the guard; the number of held entries is that of the store."""
        with self._lock:
            store = self._core.store
            num_held = 0 if store is None else store.stats().num_held
            return self._core.counters.stats(self._core.completions.num_pending, num_held)

    # ---- what a store does not have ----

    @property
    def store(self) -> BlockStore | None:
        """The store; None while the guard has no client."""
        return self._core.store

    def health(self) -> GuardHealth:
        """Return the state of the breaker and of the staging memory, and the counters of failures."""
        with self._lock:
            return health_of(self._core, self._clock())

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself; nothing may be pending."""
        with self._lock:
            self._core.check_invariants()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the thread ----

    def _submit(self, kind: Kind, keys: Keys, pieces: Pieces | None, before: Keys | None = None) -> int:
        with self._lock:
            if self._is_closing:
                raise StoreError(f"the guard of {self.name} is closed; open a new one")
            if kind in (Kind.STORE, Kind.REMOVE) and self._core.read_only:
                ticket = self._core.completions.open()
                self._core.completions.end(ticket, np.zeros(len(keys), np.bool_), "the guard is read-only")
                return ticket
            ticket = self._core.submit(kind, keys, pieces, self._clock(), before)
            self._wake_thread()
            return ticket

    def _wake_thread(self) -> None:
        """Wake the thread if it has copies to make, may reopen, or would sleep past the next deadline."""
        if self._is_closing:  # its descriptor is closed, or will be, and may then be that of another file
            return
        core = self._core
        deadline = core.next_deadline()
        may_reopen = self._wants_reopen()
        if core.jobs or may_reopen or (deadline is not None and deadline < self._sleeps_until):
            self._sleeps_until = float("-inf")
            os.eventfd_write(self._wake, 1)

    _sleeps_until = float("-inf")

    def _stop(self) -> None:
        """End the thread; after an interrupt of its start it may end a moment later, without use of the guard."""
        with self._lock:
            if not self._is_closing:
                os.eventfd_write(self._wake, 1)
                self._is_closing = True
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with self._lock:  # the constructor has it until the guard has the store, or is refused
            pass
        while not self._is_closing:
            with self._lock:
                self._core.advance(self._clock())
                job = self._core.take_job()
                must_reopen = self._wants_reopen()
            if job is not None:
                self._copy(job)
            elif must_reopen:
                self._replace_client()
            else:
                self._sleep()

    def _copy(self, part: Part) -> None:
        try:
            run(part, framed=self._core.trailer > 0)
        except Exception as error:
            with self._lock:
                self._core.fail_job(part, error, self._clock())
            return
        with self._lock:
            self._core.end_job(part, self._clock())

    def _sleep(self) -> None:
        """Wait for the store, for work, or for the next deadline."""
        with self._lock:
            now, core = self._clock(), self._core
            deadline = core.next_deadline()
            if core.store is None:
                deadline = min(deadline or float("inf"), now + max(0.01, core.breaker.seconds_left(now)))
            if core.jobs or self._is_closing:
                return
            self._sleeps_until = float("inf") if deadline is None else deadline
            waiting = select.poll()
            waiting.register(self._wake, select.POLLIN)
            if core.store is not None and (ends := core.store.fileno()) >= 0:  # its owner may have closed it
                waiting.register(ends, select.POLLIN)
        seconds = None if deadline is None else min(max(0.0, deadline - now), LONGEST_SLEEP)
        waiting.poll(None if seconds is None else int(seconds * 1000) + 1)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _replace_client(self) -> None:
        """Close the client that lost memory, take the memory back, and open another; failures open the breaker.

        The next client is opened when the one before is closed. One that cannot be used is closed, too, and has no part
        of the memory: others are opened meanwhile, while at most `MAX_REFUSED` of them are being closed.
        """
        with self._lock:
            retired = self._core.abandon("the store is being reopened", self._clock())
        if retired is not None:
            self._closing = [ClosingStore(retired, self._destroyed)]
            return
        self._closing = []
        store: BlockStore | None = None
        try:
            assert self._reopen is not None
            store = self._reopen()
            with self._lock:
                self._core.adopt(store)
                self._core.counters.num_reopened += 1
        except Exception:
            with self._lock:
                self._core.breaker.trip(self._clock())
            if store is not None:
                self._refused = [each for each in self._refused if not each.is_closed]
                self._refused.append(ClosingStore(store, self._refused_closed))

    def _refused_closed(self, closing: ClosingStore, _: BlockStore) -> None:
        """Note that a refused client is closed; runs in the thread that closed it."""
        with self._lock:
            closing.is_closed = True
            if not self._is_closing:
                os.eventfd_write(self._wake, 1)

    def _wants_reopen(self) -> bool:
        """Return True if the client is to be replaced, and the clients before it are closed."""
        if self._reopen is None or not all(each.is_closed for each in self._closing):
            return False
        if sum(not each.is_closed for each in self._refused) >= MAX_REFUSED:
            return False
        return self._core.wants_reopen(self._clock())


def _check_parts(deadline: object, breaker: object, reopen: object, clock: object) -> None:
    """Raise UnsupportedOption unless the arguments are what a guard expects."""
    for name, value, kind in (("deadline", deadline, Deadline), ("breaker", breaker, Breaker)):
        if not (value is None or isinstance(value, kind)):
            raise UnsupportedOption(f"{name} is {shown(value)}; give a {kind.__name__}, or None")
    if not (reopen is None or callable(reopen)):
        raise UnsupportedOption(f"reopen is {shown(reopen)}; give a function that opens a store, or None")
    if not callable(clock):
        raise UnsupportedOption(f"clock is {shown(clock)}; give a function that returns seconds")
