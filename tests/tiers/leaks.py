"""Checks that a test leaves no threads and descriptors."""

import os
import threading
import time
from contextlib import contextmanager

# Mooncake's client may take more than 10 s to close once its master is dead.
SECONDS_TO_CLOSE = 30.0


@contextmanager
def no_threads_left():
    """Fail if a thread is left; one that closes a store has time to end."""
    before = set(threading.enumerate())
    yield
    limit = time.monotonic() + SECONDS_TO_CLOSE
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("closing "):
            thread.join(max(0.0, limit - time.monotonic()))
    assert set(threading.enumerate()) <= before


@contextmanager
def nothing_left():
    """Fail if a thread or descriptor is left."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with no_threads_left():
        yield
    assert len(os.listdir("/proc/self/fd")) == descriptors
