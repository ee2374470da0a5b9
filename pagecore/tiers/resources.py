"""Threads and descriptors of remote stores, whose lack is a DeviceError."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pagecore.errors import DeviceError


def start_thread(
    thread: threading.Thread, name: str, purpose: str, remedy: str = "raise the limit of processes"
) -> None:
    """Start a thread of the store `name`; raise DeviceError if the system has none left."""
    try:
        thread.start()
    except RuntimeError as error:
        raise DeviceError(f"{name} has no thread for {purpose}: {error}; {remedy}") from None


@contextmanager
def descriptors(name: str) -> Iterator[None]:
    """Raise DeviceError if the block finds no descriptor left for the store `name`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise DeviceError(f"{name} has no descriptor: {error}; raise the limit of open files") from None
