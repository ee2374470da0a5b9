"""Faults between a guarded remote store and its server: each ends in a miss or in the right bytes, and leaks nothing.

The store talks to a real Redis server through a proxy that cuts, hangs, flips and refuses, or the server itself is
stopped or killed.
"""

import time

import numpy as np
import pytest

from pagecore.tiers.guard import Breaker, Deadline, Guard
from pagecore.tiers.remote.resp import RespStore
from tests.tiers.blocks import Blocks, random_keys, wait
from tests.tiers.leaks import nothing_left
from tests.tiers.proxy import Proxy
from tests.tiers.remote.contract import LARGE, fingerprint

NUM_KEYS = 4
ENTRY = 24 + LARGE
SOON = Deadline(0.1, 1e9)
PATIENT = Deadline(20.0)


@pytest.fixture
def leaks():
    """Fail if a thread or descriptor is left."""
    with nothing_left():
        yield


@pytest.fixture
def proxy(resp_server, leaks):
    with Proxy(resp_server.port) as proxy:
        yield proxy


def guarded(port, salt, *, deadline=PATIENT, failures=100):
    store = RespStore(f"redis://127.0.0.1:{port}", fingerprint=fingerprint(salt), connections=1, timeout=20.0)
    return Guard(store, deadline=deadline, breaker=Breaker(failures=failures, first_pause=0.05))


@pytest.fixture
def filled(request, proxy):
    """Return a function that opens a guard whose server has `NUM_KEYS` entries; the blocks are poisoned."""
    keys, blocks = random_keys(NUM_KEYS, 0, 1), Blocks(NUM_KEYS, LARGE)
    expected = blocks.fill(0)
    salt = request.node.nodeid.encode()
    with guarded(proxy.port, salt) as guard:
        assert wait(guard, guard.submit_store(keys, blocks.pieces())).ok.all()
    blocks.poison()
    return lambda **options: (guarded(proxy.port, salt, **options), keys, blocks, expected)


def assert_right_or_missing(done, blocks, expected):
    np.testing.assert_array_equal(blocks.payloads[done.ok], expected[done.ok])


def loads_again(guard, keys, blocks, expected):
    """Load until the store works again, through the pauses of the breaker."""
    limit = time.monotonic() + 20
    while True:
        blocks.poison()
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert_right_or_missing(done, blocks, expected)
        if done.ok.all():
            return
        assert time.monotonic() < limit, done.error


@pytest.mark.parametrize(
    "at", [0, 3, 9, 20, 40, 24 + LARGE // 2, ENTRY + 5, ENTRY + 14, 2 * ENTRY + 100, 4 * ENTRY + 40]
)
def test_a_bit_that_flips_on_the_wire(filled, proxy, at):
    guard, keys, blocks, expected = filled()
    with guard:
        proxy.reset(flip_at=at)
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert_right_or_missing(done, blocks, expected)
        if 9 < at < ENTRY:
            assert done.ok.tolist() == [False, True, True, True]
            assert "differed from their sums" in done.error
        proxy.reset()
        blocks.payloads[:] = expected
        assert wait(guard, guard.submit_store(keys, blocks.pieces())).ok.all()  # the bad entry may be deleted
        loads_again(guard, keys, blocks, expected)


@pytest.mark.parametrize("after", [0, 5, 30, 1000, ENTRY + 20, 3 * ENTRY])
def test_the_server_dies_inside_a_reply(filled, proxy, after):
    guard, keys, blocks, expected = filled()
    with guard:
        proxy.reset(cut_after=after)
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert "closed the connection" in done.error
        assert not done.ok.all()
        assert_right_or_missing(done, blocks, expected)
        proxy.reset()
        loads_again(guard, keys, blocks, expected)


@pytest.mark.parametrize("after", [0, 30, ENTRY + 20])
@pytest.mark.parametrize("operation", ["lookup", "load", "store"])
def test_the_server_hangs(filled, proxy, after, operation):
    guard, keys, blocks, expected = filled(deadline=SOON)
    with guard:
        proxy.reset(hang_after=0 if operation != "load" else after)
        arguments = (keys,) if operation == "lookup" else (keys, blocks.pieces())
        begin = time.monotonic()
        done = wait(guard, getattr(guard, f"submit_{operation}")(*arguments))
        assert time.monotonic() - begin < 10
        assert "late" in done.error
        if operation == "load":
            assert_right_or_missing(done, blocks, expected)
        at_end = blocks.bytes.copy()
        proxy.reset()
        proxy.released.set()
        loads_again(guard, keys, blocks := Blocks(NUM_KEYS, LARGE), expected)
        assert guard.health().late_batches >= 1
    assert at_end is not None


def test_nothing_is_written_after_a_late_load_has_ended(filled, proxy):
    guard, keys, blocks, expected = filled(deadline=SOON)
    with guard:
        proxy.reset(hang_after=ENTRY // 2)
        assert "late" in wait(guard, guard.submit_load(keys, blocks.pieces())).error
        blocks.poison()
        proxy.reset()
        proxy.released.set()
        loads_again(guard, keys, Blocks(NUM_KEYS, LARGE), expected)
        assert blocks.is_poisoned.all()


def test_the_connection_is_refused_until_the_breaker_tries_again(filled, proxy):
    guard, keys, blocks, expected = filled(failures=3)
    with guard:
        proxy.refuse()
        errors = [wait(guard, guard.submit_lookup(keys)).error for _ in range(4)]
        assert all("cannot be reached" in error for error in errors[:3])
        assert "refused: the circuit breaker" in errors[3]
        proxy.accept()
        loads_again(guard, keys, blocks, expected)
        assert guard.health().breaker == "closed"


def test_a_load_is_cancelled_inside_a_payload(filled, proxy):
    guard, keys, blocks, expected = filled()
    with guard:
        proxy.reset(hang_after=ENTRY // 2)
        ticket = guard.submit_load(keys, blocks.pieces())
        limit = time.monotonic() + 20
        while proxy.count <= ENTRY // 2:
            assert time.monotonic() < limit
        guard.cancel(ticket)
        done = wait(guard, ticket)
        assert done.error == "cancelled"
        blocks.poison()
        proxy.reset()
        proxy.released.set()
        loads_again(guard, keys, Blocks(NUM_KEYS, LARGE), expected)
        assert blocks.is_poisoned.all()
        assert guard.health().breaker == "closed"


@pytest.mark.parametrize("fault", ["stop", "kill"])
def test_the_server_stops_or_dies_and_comes_back(leaks, private_resp, fault):
    keys, blocks = random_keys(NUM_KEYS, 0, 1), Blocks(NUM_KEYS, LARGE)
    expected = blocks.fill(0)
    with guarded(private_resp.server.port, b"", deadline=Deadline(0.3), failures=3) as guard:
        assert wait(guard, guard.submit_store(keys, blocks.pieces())).ok.all()
        getattr(private_resp, fault)()
        for _ in range(4):
            blocks.poison()
            done = wait(guard, guard.submit_load(keys, blocks.pieces()))
            assert done.error is not None
            assert_right_or_missing(done, blocks, expected)
        assert guard.health().breaker != "closed"
        if fault == "stop":
            private_resp.resume()
        else:
            private_resp.start()
            limit = time.monotonic() + 20
            blocks.payloads[:] = expected
            while not wait(guard, guard.submit_store(keys, blocks.pieces())).ok.all():
                assert time.monotonic() < limit
        loads_again(guard, keys, blocks, expected)


def test_close_does_not_wait_for_a_server_that_hangs(filled, proxy):
    guard, keys, blocks, _ = filled()
    proxy.reset(hang_after=10)
    ticket = guard.submit_load(keys, blocks.pieces())
    begin = time.monotonic()
    guard.close()
    assert time.monotonic() - begin < 10
    assert [done.ticket for done in guard.poll()] == [ticket]
