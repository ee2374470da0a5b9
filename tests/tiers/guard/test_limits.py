"""Limits of Guard: the circuit breaker, deadlines and clocks, cancellation, and the staging memory."""

import time

import numpy as np
import pytest

from pagecore.tiers.guard import Breaker, Deadline, Guard
from tests.tiers.blocks import Blocks, random_keys, wait
from tests.tiers.guard.kit import NBYTES, SOON, stored
from tests.tiers.memory_store import MemoryStore


def test_a_load_that_the_store_refuses_holds_nothing(kind, blocks):
    keys = random_keys(8)
    store = MemoryStore(**kind)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        assert wait(guard, guard.submit_lookup(keys)).ok.all()
        assert guard.stats().num_held == 8
        store.inject("load", "raise", 8)
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert (done.ok.any(), done.error) == (False, "OSError: injected")
        assert guard.stats().num_held == 0
        guard.check_invariants()


def test_loads_larger_than_the_staging_memory_pass_in_parts():
    large = Blocks(64, NBYTES)
    data = MemoryStore(verifies=False)
    keys = random_keys(64)
    with Guard(data) as guard:
        expected = large.fill(1)
        stored(guard, large, keys)
    store = MemoryStore(verifies=False, data=data.data)
    with Guard(store, budget_bytes=10 * 4096, deadline=Deadline(60.0)) as guard:
        large.poison()
        assert wait(guard, guard.submit_load(keys, large.pieces())).ok.all()
        np.testing.assert_array_equal(large.payloads, expected)


def test_a_payload_larger_than_the_staging_memory_is_refused_and_named():
    large = Blocks(2, 3 * 4096)
    with Guard(MemoryStore(verifies=False), budget_bytes=2 * 4096) as guard:
        done = wait(guard, guard.submit_load(random_keys(2), large.pieces()))
        assert not done.ok.any()
        assert "exceed the staging memory" in done.error
        assert guard.health().breaker == "closed"


@pytest.mark.parametrize("verifies", [True, False])
def test_stores_are_dropped_when_the_budget_is_in_use_and_loads_wait(verifies, blocks):
    keys = random_keys(8)
    store = MemoryStore(verifies=verifies, manual=True)
    with Guard(store, budget_bytes=10 * 4096, deadline=Deadline(60.0)) as guard:
        first = guard.submit_store(keys[:2], blocks.pieces([0, 1]))
        second = guard.submit_store(keys[2:6], blocks.pieces([2, 3, 4, 5]))
        load = guard.submit_load(keys[:2], blocks.pieces([6, 7]))
        limit = time.monotonic() + 20
        while not guard.drain(0):
            store.release()
            assert time.monotonic() < limit
        ended = {done.ticket: done for done in guard.poll()}
        assert ended[first].ok.all()
        assert ended[second].ok.sum() < 4
        assert "dropped" in ended[second].error
        assert ended[load].ok.all() or verifies
        assert guard.health().breaker == "closed"


def test_three_failures_open_the_breaker_and_a_probe_closes_it(blocks):
    now = [0.0]
    store = MemoryStore()
    keys = random_keys(8)
    with Guard(store, clock=lambda: now[0]) as guard:
        store.inject("lookup", "error", 3)
        for _ in range(3):
            assert wait(guard, guard.submit_lookup(keys)).error == "injected"
        assert guard.health().breaker == "open"
        assert "circuit breaker is open" in wait(guard, guard.submit_lookup(keys)).error
        now[0] = 1.0
        store.inject("lookup", "error")
        assert wait(guard, guard.submit_lookup(keys)).error == "injected"
        now[0] = 2.9
        assert "refused" in wait(guard, guard.submit_lookup(keys)).error
        now[0] = 3.0
        assert wait(guard, guard.submit_lookup(keys)).error is None
        assert guard.health().breaker == "closed"


def test_loads_that_are_refused_give_up_their_holds(blocks):
    store = MemoryStore()
    keys = random_keys(8)
    with Guard(store, breaker=Breaker(failures=1)) as guard:
        stored(guard, blocks, keys)
        assert wait(guard, guard.submit_lookup(keys)).ok.all()
        store.inject("store", "error")
        wait(guard, guard.submit_store(random_keys(8, 1), blocks.pieces()))
        assert "refused" in wait(guard, guard.submit_load(keys, blocks.pieces())).error
        assert guard.stats().num_held == 0


def test_loads_that_wait_for_memory_give_up_their_holds_when_they_are_cancelled(blocks):
    store = MemoryStore(verifies=False)
    keys = random_keys(8)
    with Guard(store, budget_bytes=24 * 4096, deadline=Deadline(60.0)) as guard:
        stored(guard, blocks, keys)
        assert wait(guard, guard.submit_lookup(keys)).ok.all()
        store.inject("load", "hang", 8)
        first = guard.submit_load(keys, blocks.pieces())
        assert wait(guard, guard.submit_lookup(keys[:2])).ok.all()
        second = guard.submit_load(keys[:2], blocks.pieces([0, 1]))
        guard.cancel(second)
        assert wait(guard, second).error == "cancelled"
        assert guard.stats().num_held == 8
        store.release()
        assert wait(guard, first).ok.all()
        assert guard.stats().num_held == 0


def test_a_jump_of_the_clock_leaves_everything_usable(blocks):
    now = [1000.0]
    store = MemoryStore(manual=True, verifies=False)
    keys = random_keys(8)
    with Guard(store, clock=lambda: now[0]) as guard:
        ticket = guard.submit_lookup(keys)
        now[0] = 10.0
        assert guard.poll() == []
        store.release()
        assert wait(guard, ticket).error is None
        ticket = guard.submit_lookup(keys)
        now[0] = 1e9
        assert "late" in wait(guard, ticket).error
        store.manual = False
        assert wait(guard, guard.submit_lookup(keys)).error is None


@pytest.mark.parametrize("seconds", [1e7, 1e300, float("inf")])
def test_a_deadline_of_months_leaves_the_thread_at_work(seconds):
    store, keys = MemoryStore(manual=True), random_keys(8)
    with Guard(store, deadline=Deadline(seconds)) as guard:
        first = guard.submit_lookup(keys)
        guard.submit_lookup(keys)
        store.release(store.hanging[0].ticket)
        wait(guard, first)
        while guard._thread.is_alive() and guard._sleeps_until != guard._core.next_deadline():
            time.sleep(0.001)
        store.release()
        assert guard.drain(20.0)  # which leaves the work to the thread


def test_a_cancelled_batch_ends_soon_and_is_no_failure_of_the_store(kind, blocks):
    store = MemoryStore(**kind)
    keys = random_keys(8)
    with Guard(store, breaker=Breaker(failures=1), deadline=Deadline(60.0)) as guard:
        stored(guard, blocks, keys)
        blocks.poison()
        store.inject("load", "hang")
        ticket = guard.submit_load(keys, blocks.pieces())
        guard.cancel(ticket)
        done = wait(guard, ticket)
        assert not done.ok.any()
        assert done.error == "cancelled"
        guard.cancel(ticket)
        guard.cancel(12345)
        assert guard.poll() == []
        assert guard.health().breaker == "closed"
        assert blocks.is_poisoned.all()


def test_entries_that_a_late_lookup_finds_are_unlocked(blocks):
    store = MemoryStore()
    keys = random_keys(8)
    with Guard(store, deadline=SOON) as guard:
        stored(guard, blocks, keys)
        store.inject("lookup", "hang")
        store.cancel = lambda ticket: None
        assert "late" in wait(guard, guard.submit_lookup(keys)).error
        store.release()
        assert sum(store.holds.values()) == 8
        guard.poll()
        assert sum(store.holds.values()) == 0
