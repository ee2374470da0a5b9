"""Remote stores with blocking connections: threads with one connection each, which take loads before stores."""

from __future__ import annotations

import signal
import threading
from abc import abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.remote.store import Batch, Identity, Kind, RemoteStore
from pagecore.tiers.resources import start_thread
from pagecore.tiers.store import Keys, Pieces

# Payload bytes of one task: a load waits for at most one such task of a store, and a batch spreads over connections.
TASK_BYTES = 4 << 20
TASK_KEYS = 1024
# Signals that a thread raises itself, which a mask would keep from fault handlers and profilers.
OWN_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGPROF}
ORDER: tuple[Kind, ...] = ("lookup", "load", "store", "remove")


class Connection(Protocol):
    """One connection to a server; all methods but `abort` are called by one thread.

    `lookup`, `load`, `store` and `remove` mark in `ok` each key that is done, and return a reason if a key failed for
    another reason than absence: one of class `Full` if the server works and has no room. They raise when the connection
    is no longer usable.
    """

    def open(self) -> None:
        """Connect."""

    def lookup(self, keys: Keys, ok: NDArray[np.bool_]) -> str | None:
        """Find entries."""

    def load(self, keys: Keys, pieces: Pieces, ok: NDArray[np.bool_]) -> str | None:
        """Read entries and verify them."""

    def store(self, keys: Keys, pieces: Pieces, ok: NDArray[np.bool_]) -> str | None:
        """Write entries that do not exist."""

    def remove(self, keys: Keys, ok: NDArray[np.bool_]) -> str | None:
        """Delete entries; one that does not exist is done."""

    def abort(self) -> None:
        """Let a running call of another thread raise soon."""

    def close(self) -> None:
        """Release the connection."""


@dataclass(eq=False, slots=True)
class _Task:
    """Keys ``[begin, end)`` of a batch."""

    batch: Batch
    begin: int
    end: int


@dataclass(eq=False, slots=True)
class _Worker:
    """A thread with its connection, and the task that it carries out."""

    connection: Connection | None = None
    task: _Task | None = None
    thread: threading.Thread | None = None


class WorkerStore(RemoteStore):
    """A remote store over blocking connections.

    Invariants, under `_changed`: each task of a pending batch is in `_queues`, or is the task of one worker; a batch
    ends when its last task does. A worker reads and writes pieces of its task alone.
    """

    def __init__(self, name: str, fingerprint: Identity, first: Connection, num_connections: int) -> None:
        super().__init__(name, fingerprint)
        self._queues: dict[Kind, deque[_Task]] = {kind: deque() for kind in ORDER}
        self._left: dict[Batch, int] = {}
        self._workers = [_Worker(first if index == 0 else None) for index in range(num_connections)]
        try:
            for index, worker in enumerate(self._workers):
                thread = threading.Thread(
                    target=self._run, args=(worker,), name=f"pagecore {name} {index}", daemon=True
                )
                start_thread(thread, name, "a connection", "use fewer, or raise the limit of processes")
                worker.thread = thread
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _connect(self) -> Connection:
        """Return one more connection, which is not open."""

    def _start(self, batch: Batch) -> None:
        bounds = [0]
        size = 0
        sizes = batch.pieces[:, 1].tolist() or [0] * len(batch.keys)
        for index, nbytes in enumerate(sizes):
            if index > bounds[-1] and (size + nbytes > TASK_BYTES or index - bounds[-1] >= TASK_KEYS):
                bounds.append(index)
                size = 0
            size += nbytes
        bounds.append(len(batch.keys))
        self._left[batch] = len(bounds) - 1
        tasks = (_Task(batch, begin, end) for begin, end in pairwise(bounds))
        self._queues[batch.kind].extend(tasks)
        self._changed.notify(self._left[batch])

    def _stop(self, batch: Batch) -> None:
        queue = self._queues[batch.kind]
        for task in [task for task in queue if task.batch is batch]:
            queue.remove(task)
            self._end_task(task)
        for worker in self._workers:
            if worker.task is not None and worker.task.batch is batch and worker.connection is not None:
                worker.connection.abort()

    def _release(self) -> None:
        for worker in self._workers:
            if worker.thread is not None:
                worker.thread.join()
            self._disconnect(worker)

    # ---- threads ----

    def _run(self, worker: _Worker) -> None:
        # The main thread handles signals; one that interrupts a receive here would begin its timeout again.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - OWN_SIGNALS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or any(self._queues.values()))
                if self._is_closed:
                    return
                queue = next(self._queues[kind] for kind in ORDER if self._queues[kind])
                worker.task = task = queue.popleft()
            error = self._carry_out(worker, task)
            with self._changed:
                worker.task = None
                task.batch.note(error)
                self._end_task(task)

    def _end_task(self, task: _Task) -> None:
        self._left[task.batch] -= 1
        if not self._left[task.batch]:
            del self._left[task.batch]
            self._end(task.batch)

    def _carry_out(self, worker: _Worker, task: _Task) -> str | None:
        """Carry out a task; a connection that turns out to be closed is replaced once."""
        while True:
            is_new = worker.connection is None
            try:
                if is_new:
                    self._reconnect(worker)
                return self._call(worker, task)
            except Exception as error:
                self._disconnect(worker)
                task.batch.ok[task.begin : task.end] &= task.batch.kind == "store"
                if is_new or task.batch.is_cancelled or isinstance(error, TimeoutError):
                    return str(error) or type(error).__name__

    def _reconnect(self, worker: _Worker) -> None:
        connection = self._connect()
        with self._changed:
            worker.connection = connection  # `_stop` can abort it from here on
            if worker.task is None or worker.task.batch.is_cancelled:
                raise ConnectionAbortedError("cancelled")
        connection.open()

    def _disconnect(self, worker: _Worker) -> None:
        with self._changed:
            connection, worker.connection = worker.connection, None
        if connection is not None:
            with suppress(Exception):
                connection.close()

    def _call(self, worker: _Worker, task: _Task) -> str | None:
        batch, cut = task.batch, slice(task.begin, task.end)
        connection = worker.connection
        assert connection is not None
        if batch.is_cancelled:
            return "cancelled"
        if batch.kind in ("lookup", "remove"):
            ask = connection.lookup if batch.kind == "lookup" else connection.remove
            return ask(batch.keys[cut], batch.ok[cut])
        call = connection.load if batch.kind == "load" else connection.store
        return call(batch.keys[cut], batch.pieces[cut], batch.ok[cut])
