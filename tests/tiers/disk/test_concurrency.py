"""Batches of a DiskStore that run at once: shared writes, cancellation, order, close, and threads."""

import os
import select
import signal
import threading

import numpy as np
import pytest

from pagecore.errors import UnsupportedOption
from tests.faults import PAGECORE, raise_at
from tests.tiers.disk.kit import PAYLOAD, FileOps, Memory, finish, get, keys_of, look, open_store, put


def test_a_key_that_another_batch_writes_shares_its_result(tmp_path):
    gate = threading.Event()
    fail = []

    def on_write(fd, parts, offset):
        gate.wait(30)
        return -5 if fail else None

    ops = FileOps(on_write=on_write)
    with open_store(tmp_path, slots=8, threads=2, ops=ops) as store:
        for failing in (False, True):
            fail[:] = [1] if failing else []
            numbers = [10, 11] if failing else [0, 1]
            keys = keys_of(store, [*numbers, numbers[0]])
            memory = Memory(3).fill(keys)
            gate.clear()
            tickets = [store.submit_store(keys, memory.pieces)]
            tickets.append(store.submit_store(keys[:2], memory.pieces[:2]))
            assert not look(store, numbers).ok.any()  # not published yet
            store.check_invariants()
            writes = ops.num_writes
            gate.set()
            for ticket in tickets:
                done = finish(store, ticket)
                assert done.ok.tolist() == [not failing] * len(done.ok)
            assert ops.num_writes - writes <= 3
        assert get(store, [0, 1, 10]).ok.tolist() == [True, True, False]
        store.check_invariants()


def test_cancelled_batches_end_and_leave_every_slot(tmp_path):
    gate = threading.Event()

    def wait(fd, parts, offset):
        gate.wait(30)

    ops = FileOps(on_write=wait)
    with open_store(tmp_path, slots=8, threads=1, ops=ops) as store:
        keys = keys_of(store, range(8))
        memory = Memory(8).fill(keys)
        ticket = store.submit_store(keys, memory.pieces)
        store.cancel(ticket)
        for unknown in (12345, 0, -1, 1 << 64):
            store.cancel(unknown)
        gate.set()
        done = finish(store, ticket)
        assert done.error == "cancelled"
        assert done.ok.sum() <= 1
        store.check_invariants()
        assert put(store, range(8)).ok.all()
        gate.clear()
        ops.on_read, ops.on_write = wait, None
        target = Memory(8)
        assert look(store, range(8)).ok.all()
        ticket = store.submit_load(keys, target.pieces)
        store.cancel(ticket)
        gate.set()
        assert finish(store, ticket).ok.sum() <= 1
        store.check_invariants()
        assert store.stats().num_held == 0
        assert get(store, range(8)).ok.all()  # a cancelled load drops nothing


def test_loads_go_before_stores(tmp_path):
    gate, order = threading.Event(), []
    started = threading.Event()

    def on_read(fd, parts, offset):
        order.append("load")

    def on_write(fd, parts, offset):
        started.set()
        gate.wait(30)
        order.append("store")

    ops = FileOps()
    with open_store(tmp_path, slots=16, threads=1, ops=ops) as store:
        put(store, range(4))
        ops.on_read, ops.on_write = on_read, on_write
        keys = keys_of(store, range(10, 14))
        memory = Memory(4).fill(keys)
        stored = store.submit_store(keys, memory.pieces)
        assert started.wait(30)
        target = Memory(4)
        loaded = store.submit_load(keys_of(store, range(4)), target.pieces)
        gate.set()
        assert finish(store, loaded).ok.all()
        assert finish(store, stored).ok.all()
        assert order[:5] == ["store"] + ["load"] * 4


def test_drain_waits_with_a_limit(tmp_path):
    gate = threading.Event()
    ops = FileOps(on_write=lambda fd, parts, offset: gate.wait(30) and None)
    with open_store(tmp_path, ops=ops) as store:
        assert store.drain(0)
        keys = keys_of(store, [0])
        memory = Memory(1).fill(keys)
        ticket = store.submit_store(keys, memory.pieces)
        assert not store.drain(0.01)
        assert store.stats().num_pending == 1
        gate.set()
        assert store.drain()
        assert select.select([store.fileno()], [], [], 0)[0]
        assert [done.ticket for done in store.poll()] == [ticket]


def test_close_ends_every_batch_and_releases_everything(tmp_path):
    def descriptors():
        return sorted(os.listdir("/proc/self/fd"))

    before, threads = descriptors(), len(os.listdir("/proc/self/task"))
    gate = threading.Event()
    ops = FileOps(on_write=lambda fd, parts, offset: gate.wait(0.05) and None)
    store = open_store(tmp_path, threads=2, ops=ops)
    assert look(store, [0]).ok.tolist() == [False]
    keys = keys_of(store, range(8))
    memory = Memory(8).fill(keys)
    tickets = [store.submit_store(keys, memory.pieces), store.submit_lookup(keys)]
    store.close()
    store.close()
    assert sorted(done.ticket for done in store.poll()) == tickets
    assert store.poll() == []
    assert store.drain(1)
    assert store.fileno() == -1
    store.unlock(keys)
    store.cancel(1)
    for call in (store.submit_lookup, lambda k: store.submit_load(k, memory.pieces)):
        with pytest.raises(UnsupportedOption, match="closed"):
            call(keys)
    assert store.stats().num_pending == 0
    assert descriptors() == before
    assert len(os.listdir("/proc/self/task")) == threads
    forgotten = open_store(tmp_path)
    del forgotten
    assert descriptors() == before


def test_threads_share_a_store(tmp_path):
    """Four threads store, look up, load and cancel at random; each ticket ends once, and every loaded byte is right."""
    with open_store(tmp_path, slots=12, threads=3) as store:
        ended, tickets, lock = [], [], threading.Lock()
        memories = {}

        def work(seed):
            rng = np.random.default_rng(seed)
            for _ in range(40):
                numbers = rng.integers(0, 30, rng.integers(1, 5))
                keys = keys_of(store, numbers)
                kind = rng.integers(0, 4)
                memory = Memory(len(keys))
                if kind == 0:
                    ticket = store.submit_lookup(keys)
                    store.unlock(keys)
                elif kind == 1:
                    ticket = store.submit_load(keys, memory.pieces)
                else:
                    ticket = store.submit_store(keys, memory.fill(keys).pieces)
                with lock:
                    tickets.append(ticket)
                    memories[ticket] = kind, keys, memory
                    ended.extend(store.poll())
                if kind == 3:
                    store.cancel(ticket)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.drain(30)
        ended += store.poll()
        assert sorted(done.ticket for done in ended) == sorted(tickets)
        for done in ended:
            kind, keys, memory = memories[done.ticket]
            if kind == 1:
                expected = Memory(len(keys)).fill(keys)
                np.testing.assert_array_equal(memory.rows[done.ok, :PAYLOAD], expected.rows[done.ok, :PAYLOAD])
        store.check_invariants()
        for lane in store._lanes:
            for key in list(lane.held.elements()):
                lane.unhold(key)
        store.check_invariants()


def test_an_interrupt_leaves_no_lock_behind(tmp_path):
    """The exception is kept, as an interactive interpreter keeps the last one, and with it the frames of the call."""
    store, kept, num_held = open_store(tmp_path, slots=6, threads=1), [], 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for index in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + index % 97 * 3e-6)
                while True:
                    store.poll()
            except KeyboardInterrupt as error:
                kept.append(error)
            num_held += store._lock._is_owned()
            kept.clear()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_held == 0
    store.check_invariants()


@pytest.mark.slow
def test_a_batch_that_waits_for_another_ends_after_an_interrupt_of_a_poll(tmp_path):
    for point in range(1, 400):
        gate = threading.Event()
        ops = FileOps(on_write=lambda *_, gate=gate: gate.wait(30) and None)
        with open_store(tmp_path / str(point), slots=6, threads=1, ops=ops) as store:
            keys = keys_of(store, [0, 1])
            memory = Memory(2).fill(keys)
            store.submit_store(keys[:1], memory.pieces[:1])
            store.submit_store(keys, memory.pieces)
            gate.set()
            assert store._queue.drain(30)
            run = raise_at(store.poll, point, PAGECORE / "tiers" / "disk" / "ledger.py")
            store.poll()
            assert store.stats().num_pending == 0, run.where
            store.check_invariants()
            assert store.has(keys).all()
        if not run.reached:
            return
    raise AssertionError("a poll has more points than expected")
