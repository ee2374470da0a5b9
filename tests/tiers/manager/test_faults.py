"""The table of faults, through Tiers: each ends in a miss or in the right bytes, and leaks nothing.

`Served` compares every byte that it reuses. The stores' own tests cover the faults in depth; here each has a row.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pagecore.errors import StoreError
from pagecore.tiers.guard import Breaker, Deadline, Guard
from tests.tiers.disk.kit import FileOps, open_store, short
from tests.tiers.leaks import nothing_left
from tests.tiers.manager.served import Served
from tests.tiers.memory_store import MemoryStore

ROOT = Path(__file__).parents[3]
PROMPT = np.arange(33, dtype=np.int32)
OTHER = PROMPT + 1000
# Three files of 1 MiB and less; entries take 4 KiB.
MAX_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def leaks():
    """Fail if a thread or descriptor is left."""
    with nothing_left():
        yield


def disk(folder, ops=None, **guard):
    """Return a function that opens a guarded disk store for a fingerprint."""

    def make(fingerprint):
        store = open_store(folder, fingerprint=fingerprint, max_bytes=MAX_BYTES, threads=2, ops=ops)
        return Guard(store, **{"breaker": Breaker(failures=100), "deadline": Deadline(20.0), **guard})

    return make


def guarded(store, **guard):
    return Guard(store, **{"breaker": Breaker(failures=100), "deadline": Deadline(20.0), **guard})


@pytest.fixture
def filled(tmp_path):
    """Return a folder whose disk store has the entries of PROMPT."""
    with Served([disk(tmp_path)]) as served:
        served.serve(PROMPT)
        served.flush()
    return tmp_path


# -- disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["short", "short for good", "EIO", "flip", "zeros"])
def test_reads_that_go_wrong(filled, fault):
    def on_read(fd, parts, offset):
        if fault == "short":
            return os.preadv(fd, short(parts, 1024), offset)
        if fault == "short for good":
            return 0
        if fault == "EIO":
            return -errno.EIO
        count = os.preadv(fd, parts, offset)
        for part in parts:
            if fault == "flip":
                part[100] ^= 4
            else:
                part[:] = bytes(len(part))
        return count

    ops = FileOps()
    with Served([disk(filled, ops)]) as served:
        ops.on_read = on_read
        request = served.serve(PROMPT)
        assert request.num_tokens == (32 if fault == "short" else 0)
        ops.on_read = None
        served.serve(OTHER)
        served.flush()
    with Served([disk(filled)]) as served:
        assert served.serve(OTHER).num_tokens == 32


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_writes_that_fail(tmp_path, code):
    ops = FileOps()
    with Served([disk(tmp_path, ops)]) as served:
        ops.on_write = lambda *_: -code
        served.serve(PROMPT)
        served.forget()
        assert served.serve(PROMPT).num_tokens == 0
        ops.on_write = None
        served.forget()
        served.serve(OTHER)
        served.forget()
        assert served.serve(OTHER).num_tokens == 32


def test_a_slow_device_is_late_and_its_bytes_still_land(filled):
    gate = threading.Event()
    ops = FileOps()
    with Served([disk(filled, ops)]) as served:
        ops.on_read = lambda *_: gate.wait(20) and None
        request = served.serve(PROMPT, deadline=0.02)
        assert (request.state, request.num_tokens, request.is_retired) == ("late", 0, False)
        gate.set()
        served.flush()
        assert request.is_retired
        served.cache.clear_prefix_cache()
        assert served.serve(PROMPT).num_tokens == 32


def test_torn_writes(tmp_path):
    def on_write(fd, parts, offset):
        if offset >= 8192 and sum(map(len, parts)) > 512:  # a payload: its second half is lost
            return os.pwritev(fd, short(parts, sum(map(len, parts)) // 2), offset) and sum(map(len, parts))
        return None

    ops = FileOps(on_write=on_write)
    with Served([disk(tmp_path, ops)]) as served:
        served.serve(PROMPT)
        served.forget()
        served.serve(PROMPT)
    with Served([disk(tmp_path)]) as served:
        served.serve(PROMPT)


WRITER = """
import sys
import numpy as np
from pagecore.tiers.disk import DiskStore
from tests.tiers.manager.served import Served

make = lambda fingerprint: DiskStore(sys.argv[1], fingerprint=fingerprint, max_bytes=1 << 20, threads=2)
served = Served([make])
served.serve(np.arange(33, dtype=np.int32))
served.flush()
print("written", flush=True)
for number in range(1 << 20):
    served.serve(np.arange(33, dtype=np.int32) + 100 * (number % 40))  # the store has room for a part of them
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_a_store_that_opens(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout.readline() == "written\n"
        time.sleep(0.05)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(20)
        writer.stdout.close()
    with Served([disk(tmp_path)], write="explicit") as served:  # a write would evict what the next prompt needs
        for number in range(40):
            served.serve(PROMPT + 100 * number)
        assert served.reused > 0


def test_two_writers_are_refused(tmp_path):
    with Served([disk(tmp_path)]) as served:
        with pytest.raises(StoreError):
            disk(tmp_path)(served.fingerprint)
        served.serve(PROMPT)


def test_a_stale_fingerprint_finds_nothing(filled):
    with Served([disk(filled)], model="retrained") as served:
        assert served.serve(PROMPT).num_tokens == 0
    with Served([disk(filled)]) as served:
        assert served.serve(PROMPT).num_tokens == 32


# -- any store -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stored():
    """Return the entries of PROMPT, as a dict."""
    data = {}
    with Served([guarded(MemoryStore(data=data))]) as served:
        served.serve(PROMPT)
        served.flush()
    return data


@pytest.mark.parametrize("kind", ["lookup", "load"])
@pytest.mark.parametrize("fault", ["error", "gone", "raise", "part", "flip"])
def test_a_faulty_store(stored, kind, fault):
    store = MemoryStore(data=stored)
    with Served([guarded(store)]) as served:
        store.inject(kind, fault)
        found = served.serve(PROMPT).num_tokens
        assert found == (32 if kind == "lookup" and fault in ("part", "flip") else 0)
        assert store.stats().num_held == 0
        served.forget()
        if fault != "gone":
            assert served.serve(PROMPT).num_tokens == 32


@pytest.mark.parametrize("fault", ["error", "raise", "part", "flip", "hang"])
def test_a_store_that_does_not_take_entries(fault):
    store = MemoryStore()
    with Served([guarded(store, deadline=Deadline(0.05))]) as served:
        store.inject("store", fault)
        served.serve(PROMPT)
        served.forget()
        assert not store.data
        served.serve(PROMPT)
        served.forget()
        assert served.serve(PROMPT).num_tokens == 32


@pytest.mark.parametrize("kind", ["lookup", "load"])
def test_a_server_that_hangs(stored, kind):
    store = MemoryStore(data=stored)
    with Served([guarded(store, deadline=Deadline(0.05))]) as served:
        store.inject(kind, "hang")
        request = served.serve(PROMPT)
        assert (request.state, request.num_tokens) == ("ready", 0)
        served.forget()
        assert served.serve(PROMPT).num_tokens == 32


def test_a_nearer_store_that_hangs_does_not_hide_a_farther_one(stored):
    near = MemoryStore(medium="DISK", name="near")
    with Served([guarded(near, deadline=Deadline(0.05)), guarded(MemoryStore(data=stored))]) as served:
        near.inject("lookup", "hang")
        assert served.serve(PROMPT).loaded_tokens == {"EXTERNAL": 32}


@pytest.mark.slow
def test_a_dead_store_is_left_alone_until_it_is_back(stored):
    store = MemoryStore(data=stored)
    guard = Guard(store, breaker=Breaker(failures=3, first_pause=0.05, longest_pause=0.05))
    with Served([guard]) as served:
        store.inject("lookup", "error", 5)
        store.inject("store", "error", 5)
        for _ in range(3):
            served.serve(PROMPT)
            served.forget()
        assert guard.health().breaker == "open"
        limit = time.monotonic() + 20
        while not served.serve(PROMPT).loaded_tokens:
            served.forget()
            assert time.monotonic() < limit
        assert guard.health().breaker == "closed"


def test_a_late_write_reaches_no_memory_of_the_cache(stored):
    store = MemoryStore(data=stored, writes_late=True)
    with Served([guarded(store, deadline=Deadline(0.05), budget_bytes=1 << 20)]) as served:
        store.inject("load", "hang")
        assert served.serve(PROMPT).num_tokens == 0
        for number in range(4):  # the host's blocks have new owners
            served.serve(OTHER + 100 * number)
        assert store.write_late() > 0
        for number in range(4):
            served.serve(OTHER + 100 * number)
            served.tiers.check_invariants()


def test_a_duplicate_key_race():
    data = {}
    stores = [guarded(MemoryStore(data=data, delay=0.005)) for _ in range(2)]
    with Served(stores[:1]) as one, Served(stores[1:]) as two:
        one.serve(PROMPT)
        two.serve(PROMPT)
        requests = [served.tiers.request(PROMPT) for served in (one, one, two)]
        one.forget()
        two.forget()
        assert len(data) == 8
        requests = [(served, served.tiers.request(PROMPT)) for served in (one, one, two)]
        for served, request in requests:
            assert served.tiers.wait(request, 20.0).num_tokens == 32
            assert served.compute(PROMPT) == 32


@pytest.mark.parametrize("writes_late", [False, True])
def test_a_load_that_is_cancelled(stored, writes_late):
    store = MemoryStore(data=stored, writes_late=writes_late)
    with Served([guarded(store, budget_bytes=1 << 20)]) as served:
        store.inject("load", "hang")
        request = served.tiers.request(PROMPT)
        limit = time.monotonic() + 20
        while request.state == "searching":
            served.tiers.poll()
            assert time.monotonic() < limit
        request.cancel()
        served.tiers.wait(request, 20.0)
        assert (request.state, request.num_tokens) == ("late", 0)
        served.flush()
        assert request.is_retired
        assert served.serve(PROMPT).num_tokens == 32


@pytest.mark.parametrize("seconds", [-1e9, 1e9])
def test_a_clock_that_jumps(stored, monkeypatch, seconds):
    wall = time.time
    with Served([guarded(MemoryStore(data=stored, delay=0.01))]) as served:
        request = served.tiers.request(PROMPT, deadline=20.0)
        monkeypatch.setattr(time, "time", lambda: wall() + seconds)
        served.tiers.wait(request, 20.0)
        assert (request.state, request.num_tokens) == ("ready", 32)


def test_a_host_full_of_pinned_blocks(stored):
    with Served([guarded(MemoryStore(data=stored))], host_blocks=9) as served:
        served.serve(OTHER)
        with served.tiers.host.hold(OTHER):
            request = served.serve(PROMPT)
            assert (request.state, request.num_tokens) == ("ready", 0)
        served.cache.clear_prefix_cache()
        assert served.serve(PROMPT).num_tokens == 32


def test_a_close_in_the_middle_of_a_load(stored):
    store = MemoryStore(data=stored)
    served = Served([guarded(store)])
    store.inject("load", "hang")
    request = served.tiers.request(PROMPT)
    served.tiers.wait(request, 0.05)
    served.tiers.close()
    assert request.has_ended


def test_a_close_of_another_thread_ends_a_wait(stored):
    store = MemoryStore(data=stored)
    served = Served([guarded(store)])
    store.inject("load", "hang")
    request = served.tiers.request(PROMPT)
    served.tiers._stores._epoll.close()  # the wait finds it closed, as between its check and its call
    served.tiers.wait(request, 0.05)
    served.tiers.close()
    assert request.has_ended
