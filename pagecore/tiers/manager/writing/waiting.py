"""Waits for stores: until a request has ended, until nothing is open, or until all entries are deleted."""

from __future__ import annotations

import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from pagecore.errors import UnsupportedOption
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.manager.writing.deletions import check_cleared
from pagecore.tiers.manager.writing.removal import Clearing

__all__ = ["StoreWaits"]


class StoreWaits(ABC):
    """Base class of `StoreSide`: its descriptor, and loops that take the ends of batches until something is so."""

    held: Callable[[], AbstractContextManager[object]]

    def __init__(self, ports: tuple[StorePort, ...]) -> None:
        self.ports = ports
        self._pid = os.getpid()
        self._unreturned: list[Request] = []  # ended in `drain`, until `poll` returns them
        self._epoll: select.epoll | None = select.epoll()
        for port in ports:
            self._epoll.register(port.store.fileno(), select.EPOLLIN)

    @property
    @abstractmethod
    def is_at_rest(self) -> bool:
        """True if no request is open and no store has a batch."""

    @property
    @abstractmethod
    def pause(self) -> float:
        """Longest wait between two looks, in seconds."""

    @abstractmethod
    def take_ends(self) -> list[Request]:
        """Take the ends of batches; return the requests that end with them, which `poll` does not return again."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has something to do."""
        self._check_open()
        assert self._epoll is not None
        return self._epoll.fileno()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no batch is open, with polls; return False if `timeout` seconds pass first.

        The next `poll` returns the requests that end meanwhile. Raises UnsupportedOption in a child of `os.fork` if
        batches are open.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._keep_ends()
            if self.is_at_rest:
                return True
            self._require_own_process()
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            self.wait(self.pause if left is None else min(left, self.pause))

    def wait_for(self, request: Request, timeout: float | None, poll: Callable[[], object]) -> None:
        """Call `poll` until a request has ended, which no later poll returns, or `timeout` seconds have passed."""
        end = None if timeout is None else time.monotonic() + timeout
        while not request.has_ended:
            poll()
            left = 0.02 if end is None else min(end - time.monotonic(), 0.02)
            if request.has_ended or left <= 0:
                break
            self._require_own_process()
            self.wait(left)
        if request.has_ended:
            with self.held():
                self._unreturned = [one for one in self._unreturned if one is not request]

    def finish(self, clearing: Clearing) -> None:
        """Wait until the stores have answered, or another thread closes them; raise StoreError for entries kept."""
        while clearing.open and self._keep_ends_if_open():
            if clearing.open:
                self._require_own_process()
                self.wait(0.05)
        check_cleared(clearing)

    def wait(self, timeout: float) -> None:
        """Wait until `poll` has something to do, `timeout` seconds at most."""
        epoll = self._epoll
        if epoll is not None:
            with suppress(ValueError, OSError):  # another thread has closed it
                epoll.poll(timeout)

    # -- inside --------------------------------------------------------------------------------------------------

    def _keep_ends(self) -> None:
        """Take the ends of batches; the next `poll` returns the requests that end with them."""
        with self.held():
            self._unreturned += self.take_ends()

    def _require_own_process(self) -> None:
        """Raise UnsupportedOption in a child of `os.fork`, where no thread of the stores ends a batch."""
        if os.getpid() != self._pid:
            raise UnsupportedOption(
                f"batches of the stores do not end in this fork of process {self._pid}, which has their threads: make "
                "tiers and stores here, and call drain before a fork"
            )

    def _keep_ends_if_open(self) -> bool:
        """Take the ends of batches; return False if `close` has ended all of them."""
        with self.held():
            if self._epoll is None:
                return False
            self._keep_ends()
            return True

    def _close_epoll(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
        self._epoll = None

    def _check_open(self) -> None:
        if self._epoll is None:
            raise UnsupportedOption("the tiers are closed; make new ones")
