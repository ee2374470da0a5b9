"""Stores on a StoreSide: copies to nearer ones, ledgers, failures, and the end."""

import os
from threading import Thread
from types import SimpleNamespace

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.tiers.keys import lane_keys
from tests.tiers.manager.request_world import PROMPT, chain_of, put


def test_a_store_that_raises_costs_hits_only(world):
    w = world(2)
    put(w.stores[1], w.host, PROMPT)
    w.stores[0].refuses = OSError("gone")
    request = w.side.request(PROMPT)
    for _ in range(2):
        w.stores[1].finish_all()
        w.side.poll()
    assert (request.num_tokens, request.error) == (24, "OSError: gone")


def test_a_copy_pins_what_stores_read(world):
    w = world(2, chunk_bytes=512)
    w.host.fill(PROMPT)
    prefix = SimpleNamespace(tokens=PROMPT, namespace=None, spans=None, start=8, stop=24)
    assert w.side.write([prefix]) == 4
    assert w.side.num_pins == 1
    assert not w.host.evict(0, 16)
    w.stores[0].finish_all()
    w.side.poll()
    assert w.side.num_pins == 1
    w.stores[1].finish_all()
    w.side.poll()
    assert w.side.num_pins == 0
    chain = chain_of(PROMPT)
    for store in w.stores:
        assert set(store.entries) == {bytes(key) for key in lane_keys(chain[2:6], 0)}


@pytest.mark.parametrize("most", [0, 1, 4])
def test_a_write_that_raises_pins_only_what_stores_read(world, most):
    w = world(chunk_bytes=512)
    w.host.fill(PROMPT)
    chain, made = chain_of(PROMPT), []

    def keys(lane, positions):
        if len(made) == most:
            raise MemoryError
        made.append(lane_keys(chain[positions], lane))
        return made[-1]

    with pytest.raises(MemoryError):
        w.side._writer.write(PROMPT, None, None, 0, keys)
    assert w.side.num_pins == bool(w.stores[0].batches) == (most > 1)
    w.stores[0].finish_all()
    w.side.poll()
    assert w.side.num_pins == 0
    w.side.check_invariants()


def test_close_ends_everything(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    w.side.request(PROMPT)
    w.stores[0].finish_all()
    w.side.poll()
    assert w.host.leases
    w.side.close(timeout=0.0)
    assert not w.host.leases
    assert not w.host.pins
    with pytest.raises(UnsupportedOption, match="closed"):
        w.side.poll()


def test_entries_of_a_far_store_are_copied_to_the_nearer_ones(world):
    w = world(3)
    put(w.stores[1], w.host, PROMPT, stop=12)
    put(w.stores[2], w.host, PROMPT)
    request = w.side.request(PROMPT)
    for _ in range(4):
        for store in w.stores:
            store.finish_all()
        w.side.poll()
    assert request.num_tokens == 24
    assert w.stores[0].entries == w.stores[2].entries
    assert w.stores[1].entries == w.stores[2].entries
    request.release()


def test_close_copies_nothing_to_nearer_stores(world):
    w = world(2, chunk_bytes=256)
    put(w.stores[1], w.host, PROMPT)
    w.side.request(PROMPT)
    for store in w.stores:
        store.finish_all()
    w.side.poll()
    w.stores[1].finish()  # the first of several chunks
    w.side.poll()
    w.side.close(timeout=0.0)
    assert not w.host.pins
    assert not w.stores[0].batches


def test_a_store_that_cannot_be_closed_keeps_nothing_open(world):
    w = world(2)
    put(w.stores[1], w.host, PROMPT)
    close = w.stores[0].close

    def broken():
        close()
        raise OSError("planted")

    w.stores[0].close = broken
    w.side.request(PROMPT)
    with pytest.raises(OSError, match="planted"):
        w.side.close(timeout=0.0)
    assert not w.host.pins
    assert w.stores[1].event == -1


def test_a_release_waits_for_a_poll_of_another_thread(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT)
    w.stores[0].finish()
    w.side.poll()
    hold, releasing = w.host.hold, []

    def hold_while_another_thread_releases(*args, **options):
        pin = hold(*args, **options)
        if not releasing:
            releasing.append(Thread(target=request.release))
            releasing[0].start()
            releasing[0].join(0.05)
        return pin

    w.host.hold = hold_while_another_thread_releases
    w.stores[0].finish_all()
    w.side.poll()
    releasing[0].join()
    assert not w.host.pins


@pytest.mark.parametrize("medium", ["DISK", "EXTERNAL"])
def test_a_block_that_one_store_lacks_stays_listed_while_another_of_the_medium_has_it(world, medium):
    w = world(2, mediums=[medium, medium])
    ((ledger, name),) = w.side.ledgers
    assert name == medium
    ledger.start_journal()
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT)
    w.stores[0].finish()
    w.side.poll()
    w.stores[1].finish()  # the answer of the store without the blocks comes last
    w.side.poll()
    assert [change.is_stored for change in ledger.take_changes().to_list()] == [True] * 6
    assert len(ledger.list_contents().to_list()) == 6
    w.stores[0].finish_all()
    w.side.poll()
    request.release()
    w.side.poll()
    w.host.evict(0, 16)
    w.stores[0].entries.clear()
    w.side.request(PROMPT)
    for store in w.stores:
        store.finish_all()
    w.side.poll()
    assert ledger.list_contents().to_list() == []


def test_a_failure_of_a_store_removes_nothing_from_its_ledger(world):
    w = world()
    ((ledger, _),) = w.side.ledgers
    ledger.start_journal()
    put(w.stores[0], w.host, PROMPT)
    w.side.request(PROMPT)
    w.stores[0].finish()
    w.side.poll()
    w.stores[0].finish(fails=range(100), error="planted")  # the load
    w.side.poll()
    assert len(ledger.list_contents().to_list()) == 6
    w.side.request(PROMPT)
    w.stores[0].finish(fails=range(100), error="planted")  # the look-up
    w.side.poll()
    assert len(ledger.list_contents().to_list()) == 6
    w.side.request(PROMPT)
    w.stores[0].finish(fails=range(100))  # the entries are gone
    w.side.poll()
    assert ledger.list_contents().to_list() == []


def test_a_poll_that_raises_loses_no_request(world):
    w = world()
    request = w.side.request(PROMPT)
    w.stores[0].finish_all()
    w.side.drain()
    assert request.has_ended
    poll, w.stores[0].poll = w.stores[0].poll, lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        w.side.poll()
    w.stores[0].poll = poll
    assert w.side.poll() == [request]
    assert w.side.poll() == []


@pytest.mark.parametrize("refuses", [False, True])
def test_an_end_that_raises_loses_no_later_one(world, refuses):
    w = world()
    (port,), keys, ended = w.side.ports, lane_keys(chain_of(PROMPT), 0), []

    def fails(_ok, _error):
        raise MemoryError

    w.stores[0].refuses = OSError("gone") if refuses else None
    for end in (fails, lambda ok, _error: ended.append(len(ok))):
        port.lookup(keys, end)
    w.stores[0].finish_all()
    with pytest.raises(MemoryError):
        port.poll()
    assert (ended, port.num_pending) == ([], 1)
    port.poll()
    assert (ended, port.num_pending) == ([6], 0)


def test_requests_that_are_waited_for_after_a_drain_are_returned_once(world):
    w = world()
    requests = []
    for _ in range(5):
        request = w.side.request(PROMPT)
        w.stores[0].finish_all()
        w.side.drain()
        assert request.has_ended
        requests.append(request)
        if len(requests) != 3:
            w.side.wait_for(request, None, w.side.take_ends)
    assert w.side.poll() == [requests[2]]


@pytest.mark.parametrize("is_made_before", [True, False])
def test_a_fork_waits_for_no_batch_of_stores(world, monkeypatch, is_made_before):
    w = world()
    request = w.side.request(PROMPT) if is_made_before else None
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    request = request or w.side.request(PROMPT)
    for wait in (w.side.drain, lambda: w.side.wait_for(request, None, w.side.poll)):
        with pytest.raises(UnsupportedOption, match=f"do not end in this fork of process {pid}, which has their thr"):
            wait()
    w.stores[0].finish_all()
    assert w.side.drain()
    assert request.has_ended
