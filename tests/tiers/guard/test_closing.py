"""Closing and reopening: no thread, descriptor or late write is left, whatever the store's client does."""

import errno
import gc
import os
import select
import threading
import time
import weakref

import pytest

from pagecore.errors import DeviceError, StoreError
from pagecore.tiers.guard import Breaker, Deadline, Guard, closing
from pagecore.tiers.guard import guard as guards
from pagecore.tiers.guard.staging import StagingMemory
from tests.tiers.blocks import random_keys, wait
from tests.tiers.guard.kit import SOON, stored
from tests.tiers.leaks import nothing_left
from tests.tiers.memory_store import MemoryStore


@pytest.mark.slow
def test_lost_memory_returns_only_after_the_client_was_destroyed(blocks):
    keys = random_keys(8)
    clients = [MemoryStore(writes_late=True)]

    def reopen():
        assert clients[-1].is_closed
        clients.append(MemoryStore(data=clients[0].data, writes_late=True))
        return clients[-1]

    with Guard(clients[0], deadline=SOON, budget_bytes=30 * 4096, reopen=reopen) as guard:
        stored(guard, blocks, keys)
        clients[0].inject("load", "hang", 100)
        limit = time.monotonic() + 20
        while guard.health().num_reopened == 0:
            wait(guard, guard.submit_load(keys[:2], blocks.pieces([0, 1])))
            assert time.monotonic() < limit
        assert guard.health().lost_bytes == 0
        guard.check_invariants()
    assert len(clients) == 2
    assert all(client.is_closed for client in clients)


def test_a_client_that_cannot_be_reopened_is_tried_again_after_the_pause(blocks):
    now = [0.0]
    answers = [OSError("refused"), OSError("refused"), MemoryStore(writes_late=True)]

    def reopen():
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    store = MemoryStore(writes_late=True)
    keys = random_keys(8)
    with Guard(store, budget_bytes=24 * 4096, reopen=reopen, clock=lambda: now[0]) as guard:
        store.inject("load", "hang", 100)
        ticket = guard.submit_load(keys, blocks.pieces())
        now[0] = 10.0
        assert "late" in wait(guard, ticket).error
        limit = time.monotonic() + 20
        while guard.health().num_reopened == 0:
            wait(guard, guard.submit_lookup(keys))
            now[0] += 0.5
            assert time.monotonic() < limit
        assert guard.health().lost_bytes == 0
        now[0] += 60.0
        assert wait(guard, guard.submit_lookup(keys)).error is None


def test_close_ends_all_batches_and_leaves_no_thread(kind, blocks):
    before = threading.active_count()
    store = MemoryStore(**kind, manual=True)
    guard = Guard(store, deadline=Deadline(60.0))
    keys = random_keys(8)
    tickets = {
        guard.submit_lookup(keys),
        guard.submit_load(keys, blocks.pieces()),
        guard.submit_store(keys, blocks.pieces()),
    }
    guard.close()
    assert {done.ticket for done in guard.poll()} == tickets
    assert store.is_closed
    assert guard.poll() == []
    guard.close()
    assert threading.active_count() == before
    with pytest.raises(StoreError, match="closed"):
        guard.submit_lookup(keys)


class Closing(MemoryStore):
    """A store whose `close` waits for `may_close`."""

    def __init__(self, **kind):
        super().__init__(**kind)
        self.may_close = threading.Event()

    def close(self):
        self.may_close.wait(20)
        super().close()


def test_close_leaves_a_store_that_may_write_late_and_does_not_close_to_a_thread(blocks, monkeypatch):
    monkeypatch.setattr(closing, "CLOSE_SECONDS", 0.01)
    before = set(threading.enumerate())
    store = Closing(verifies=False, writes_late=True)
    guard = Guard(store, deadline=SOON)
    keys = random_keys(8)
    stored(guard, blocks, keys)
    store.inject("load", "hang")
    blocks.poison()
    assert "late" in wait(guard, guard.submit_load(keys, blocks.pieces())).error
    guard.close()
    assert not store.is_closed
    assert store.write_late() == 1  # to staging memory, which is still there
    assert blocks.is_poisoned.all()
    (thread,) = set(threading.enumerate()) - before
    store.may_close.set()
    thread.join(20)
    assert store.is_closed
    assert set(threading.enumerate()) == before


def test_a_client_that_cannot_register_the_memory_is_closed_and_replaced(blocks):
    class Unregistered(MemoryStore):
        def register_memory(self, address, nbytes):
            raise StoreError("no memory can be locked")

        def close(self):
            super().close()
            raise StoreError("this client was refused long before")

    kind = {"verifies": False, "writes_late": True}
    clients = [MemoryStore(**kind), Unregistered(**kind), MemoryStore(**kind)]
    waiting = clients[1:]
    breaker = Breaker(first_pause=0.01)
    with Guard(
        clients[0], deadline=SOON, budget_bytes=24 * 4096, breaker=breaker, reopen=lambda: waiting.pop(0)
    ) as guard:
        clients[0].inject("load", "hang", 100)
        wait(guard, guard.submit_load(random_keys(8), blocks.pieces()))
        limit = time.monotonic() + 20
        while guard.health().num_reopened == 0:
            assert time.monotonic() < limit
            time.sleep(0.001)
        assert [client.is_closed for client in clients] == [True, True, False]
        stored(guard, blocks, random_keys(8))


@pytest.mark.parametrize("writes_late", [True, False])
def test_a_client_that_cannot_register_the_memory_and_does_not_close_stops_nothing(blocks, writes_late):
    class Unregistered(Closing):
        def register_memory(self, address, nbytes):
            raise StoreError("no memory can be locked")

    kind = {"verifies": False, "writes_late": writes_late}
    first, refused = MemoryStore(**kind, stubborn=True), Unregistered(**kind)
    refused.name = "refused"
    guard = Guard(first, deadline=SOON, budget_bytes=24 * 4096, reopen=lambda: refused)
    first.inject("load", "hang", 100)
    wait(guard, guard.submit_load(random_keys(8), blocks.pieces()))
    limit = time.monotonic() + 20
    while all(thread.name != "closing refused" for thread in threading.enumerate()):
        assert time.monotonic() < limit
        time.sleep(0.001)
    guard.close()
    assert not refused.is_closed
    refused.may_close.set()
    while not refused.is_closed:
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_a_guard_of_a_store_that_cannot_register_the_memory_leaves_nothing():
    class Unregistered(MemoryStore):
        def register_memory(self, address, nbytes):
            raise StoreError("no memory can be locked")

    with nothing_left():
        store = Unregistered(verifies=False)
        with pytest.raises(StoreError, match="no memory can be locked"):
            Guard(store)
        store.close()


def test_refused_clients_that_do_not_close_leave_room_for_others_up_to_a_bound(blocks, monkeypatch):
    class Unregistered(Closing):
        def register_memory(self, address, nbytes):
            raise StoreError("no memory can be locked")

    monkeypatch.setattr(guards, "MAX_REFUSED", 3)
    kind = {"verifies": False, "writes_late": True}
    first, opened, usable = MemoryStore(**kind), [], threading.Event()

    def reopen():
        opened.append(MemoryStore(**kind) if usable.is_set() else Unregistered(**kind))
        return opened[-1]

    breaker = Breaker(first_pause=0.001, longest_pause=0.002)
    with Guard(first, deadline=SOON, budget_bytes=24 * 4096, breaker=breaker, reopen=reopen) as guard:
        first.inject("load", "hang", 100)
        wait(guard, guard.submit_load(random_keys(8), blocks.pieces()))
        limit = time.monotonic() + 20
        while len(opened) < 3:
            assert time.monotonic() < limit
            time.sleep(0.001)
        guard.poll()
        time.sleep(0.02)  # ten pauses
        assert len(opened) == 3, "no more clients are opened while three do not close"
        usable.set()
        opened[0].may_close.set()
        while guard.health().num_reopened == 0:
            assert time.monotonic() < limit
            time.sleep(0.001)
        keys = random_keys(8, seed=3)
        stored(guard, blocks, keys)
        opened[1].may_close.set()
        while not opened[1].is_closed:
            time.sleep(0.001)
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()
        opened[2].may_close.set()
        guard.check_invariants()


@pytest.mark.parametrize("what", ["thread", "first descriptor", "second descriptor"])
@pytest.mark.parametrize("framed", [False, True])
def test_a_guard_without_threads_or_descriptors_is_refused_and_leaves_nothing(what, framed, monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    eventfd, left = os.eventfd, ["second"] * (what == "second descriptor")

    def no_descriptor(*arguments):
        if left:
            left.pop()
            return eventfd(*arguments)
        raise OSError(errno.EMFILE, "Too many open files")

    mappings = []

    class Mapped(StagingMemory):
        def __init__(self, nbytes):
            super().__init__(nbytes)
            mappings.append(self)

    monkeypatch.setattr("pagecore.tiers.guard.core.StagingMemory", Mapped)
    with nothing_left():
        store = MemoryStore(verifies=not framed)
        with monkeypatch.context() as patch:
            if what == "thread":
                patch.setattr(threading.Thread, "start", no_thread)
            else:
                patch.setattr(os, "eventfd", no_descriptor)
            with pytest.raises(DeviceError, match=f"memory has no {what.split()[-1]}.*raise the limit"):
                Guard(store)
        assert [each._mmap for each in mappings] == [None] * framed
        assert (store.is_closed, store.registered) == (False, [])
        Guard(store).close()


@pytest.mark.parametrize("runs", [True, False])
def test_an_interrupt_while_a_guard_starts_leaves_nothing(runs, monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        if runs:
            start(thread)
        raise KeyboardInterrupt

    with nothing_left():
        store = MemoryStore(verifies=False)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                Guard(store)
        assert (store.is_closed, store.registered) == (False, [])
        Guard(store).close()


def test_a_close_that_was_interrupted_is_repeated(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with nothing_left():
        store = MemoryStore(verifies=False)
        guard = Guard(store)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                guard.close()
        assert not store.is_closed
        guard.close()
        assert store.is_closed


def test_a_closed_guard_keeps_no_client():
    store = MemoryStore()
    guard = Guard(store)
    guard.take_evicted()
    client = weakref.ref(store)
    del store
    guard.close()
    gc.collect()
    assert client() is None
    assert len(guard.take_evicted()) == 0


def test_a_client_that_does_not_close_is_replaced_once_it_has_and_delays_no_batch(blocks):
    clients = [Closing(verifies=False, writes_late=True)]

    def reopen():
        clients.append(MemoryStore(verifies=False, writes_late=True))
        return clients[-1]

    keys = random_keys(8)
    with Guard(clients[0], deadline=SOON, budget_bytes=24 * 4096, reopen=reopen) as guard:
        stored(guard, blocks, keys)
        clients[0].inject("load", "hang", 100)
        wait(guard, guard.submit_load(keys, blocks.pieces()))
        while guard._core.store is not None:
            time.sleep(0.001)
        assert "being reopened" in wait(guard, guard.submit_lookup(keys)).error
        clients[0].may_close.set()
        while guard.health().num_reopened == 0:
            time.sleep(0.001)
        assert clients[0].is_closed
        assert guard.health().lost_bytes == 0


def test_close_releases_everything_if_the_store_raises(blocks):
    class Stubborn(MemoryStore):
        def close(self):
            super().close()
            raise StoreError("the server is gone")

    before = len(os.listdir("/proc/self/fd"))
    guard = Guard(Stubborn(verifies=False))
    stored(guard, blocks, random_keys(8))
    with pytest.raises(StoreError, match="the server is gone"):
        guard.close()
    assert len(os.listdir("/proc/self/fd")) == before
    guard.close()


def test_a_closed_guard_writes_to_no_descriptor():
    guard = Guard(MemoryStore(manual=True))
    tickets, wake = [guard.submit_lookup(random_keys(2)) for _ in range(2)], guard._wake
    guard.close()
    opened = [os.eventfd(0, os.EFD_NONBLOCK)]
    try:
        while opened[-1] < wake:
            opened.append(os.dup(opened[0]))
        assert wake in opened  # its number belongs to another file now
        for ticket in (*tickets, 99):
            guard.cancel(ticket)
        assert sorted(done.ticket for done in guard.poll()) == tickets
        guard.unlock(random_keys(2))
        with pytest.raises(BlockingIOError):
            os.eventfd_read(opened[0])
    finally:
        for each in opened:
            os.close(each)


def test_a_store_that_was_closed_without_its_guard_fails_each_batch(blocks):
    store = MemoryStore(verifies=False)
    with Guard(store, breaker=Breaker(failures=100)) as guard:
        store.close()
        for _ in range(3):  # the copies of each need the guard's thread
            done = wait(guard, guard.submit_store(random_keys(8), blocks.pieces()), 5.0)
            assert (done.ok.any(), done.error) == (False, "AssertionError: the store is closed")


@pytest.mark.serial
@pytest.mark.parametrize("call", ["close", "poll"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_leaves_the_descriptor_of_its_parent_as_it_is(call):
    with Guard(MemoryStore(manual=call == "close"), deadline=Deadline(60.0)) as guard:
        ticket = guard.submit_lookup(random_keys(2))
        has_ended = call == "poll"
        while guard._sleeps_until == float("-inf"):  # the thread holds the lock until it sleeps
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            try:
                getattr(guard, call)()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        for left in (has_ended, False):
            assert bool(select.select([guard.fileno()], [], [], 0)[0]) == left
            assert [done.ticket for done in guard.poll()] == [ticket] * left
