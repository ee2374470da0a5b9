"""os.fork() while another thread is in a call of a cache: the lock is free in the child, and the cache intact."""

import os
import sys
import threading
import time

import numpy as np
import pytest

from tests.cache.caches import SPEC, WINDOWED, make

pytestmark = [
    pytest.mark.serial,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # a warning of JAX, if another test has imported it
]


def child_ends_well(cache):
    """Fork; the child counts, adds and removes. Return False if it fails, or hangs for 20 seconds."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            cache.check_invariants()
            with cache.add_sequence(range(8)) as sequence:
                cache.commit(cache.prepare([sequence], 8))
            cache.check_invariants()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.001)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


def test_a_child_finds_a_cache_free_that_other_threads_use():
    cache = make([SPEC, WINDOWED], num_blocks=[40, 40], max_sequences=8)
    stop = threading.Event()

    def work(seed):
        random = np.random.default_rng(seed)
        while not stop.is_set():
            with cache.add_sequence(random.integers(0, 3, 12)) as sequence:
                cache.commit(cache.prepare([sequence], 12 - sequence.num_cached_tokens))
                assert cache.num_available >= 0

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # the main thread does not wait 5 ms for each of the others
    for thread in threads:
        thread.start()
    try:
        assert all(child_ends_well(cache) for _ in range(15))
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    cache.check_invariants()
