"""Completions of a store: tickets, the batches that ended, and the eventfd that announces them."""

from __future__ import annotations

import os
import threading
from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.store import Done


class Completions:
    """Tickets of one store, and its ended batches until `take` returns them. Safe for use by several threads.

    Invariants: a ticket ends once; the eventfd is readable iff an ended batch waits. A child of `os.fork` shares the
    eventfd with its parent, and leaves it alone.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pid = os.getpid()
        self._next = 1
        self._pending: set[int] = set()
        self._ended: list[Done] = []
        self._changed = threading.Condition(threading.Lock())

    def fileno(self) -> int:
        """Return the eventfd, -1 after `close`."""
        return self._fd

    @property
    def num_pending(self) -> int:
        """Number of tickets that have not ended."""
        return len(self._pending)

    def open(self) -> int:
        """Return a new ticket."""
        with self._changed:
            ticket = self._next
            self._next += 1
            self._pending.add(ticket)
            return ticket

    def keep(self, tickets: Set[int]) -> None:
        """Forget the pending tickets that are not among `tickets`."""
        with self._changed:
            self._pending &= tickets
            self._changed.notify_all()

    def is_pending(self, ticket: int) -> bool:
        """Return True if the ticket was issued and has not ended."""
        return ticket in self._pending

    def end(self, ticket: int, ok: NDArray[np.bool_], error: str | None = None, *, is_full: bool = False) -> bool:
        """End a ticket; return False if it has ended before."""
        with self._changed:
            if ticket not in self._pending:
                return False
            self._pending.remove(ticket)
            self._ended.append(Done(ticket, ok, error, is_full))
            if len(self._ended) == 1 and self._signals:
                os.eventfd_write(self._fd, 1)
            self._changed.notify_all()
            return True

    def take(self) -> list[Done]:
        """Return the ended batches, in the order of their ends, and clear the eventfd."""
        with self._changed:
            ended, self._ended = self._ended, []
            if ended and self._signals:
                os.eventfd_read(self._fd)
            return ended

    @property
    def _signals(self) -> bool:
        return self._fd >= 0 and os.getpid() == self._pid

    def wait(self, timeout: float | None) -> bool:
        """Wait until no ticket is pending; return False if `timeout` seconds pass first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def close(self) -> None:
        """Close the eventfd; batches that ended can still be taken."""
        with self._changed:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
