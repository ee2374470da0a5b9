"""Streams that end early: stores and copies that fail, blocks that are lost, requests given up, and closing."""

import threading

import numpy as np
import pytest

from pagecore.errors import PagecoreError
from pagecore.tiers.keys import content_chain, lane_keys
from pagecore.tiers.manager.writing.stream_parts import StreamedPrefix
from tests.tiers.manager.long_prompts import HOST, LONG, PROMPT, check_at_rest, stored
from tests.tiers.manager.plain_device import PlainDevice, StreamingHost
from tests.tiers.manager.served import BLOCK, Served, vectors
from tests.tiers.memory_store import MemoryStore


def test_a_host_full_of_pins_stores_nothing_and_drain_returns():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        lease = served.tiers.host.reserve([np.arange(HOST - 1)])
        served.compute(PROMPT)
        served.flush()
        assert not store.data
        assert served.tiers.stats().streams.num_dropped_blocks == 25
        lease.release()
        check_at_rest(served)


def test_blocks_that_the_device_has_lost_end_a_stream():
    store = MemoryStore(manual=True)
    with Served([store], stream_blocks=2, **LONG) as served:
        served.compute(PROMPT)
        served.cache.clear_prefix_cache()
        while not served.tiers.drain(0):
            store.release()
        there = stored(store, served.fingerprint)
        assert 0 < sum(there) < 25
        assert there == sorted(there, reverse=True)  # a prefix
        check_at_rest(served)
        store.manual = False


@pytest.mark.parametrize("fault", ["error", "raise", "part", "hang"])
def test_a_store_that_fails_ends_the_stream_and_a_later_sequence_streams_again(fault):
    store = MemoryStore()
    with Served([store], **LONG) as served:
        with served.tiers.add_sequence(PROMPT) as sequence:
            batch = served.cache.prepare([sequence], len(PROMPT))
            for layer in range(len(served.layers)):
                rows = vectors(PROMPT, None, layer)
                served.cache.write(layer, rows, -rows, batch)
            store.faults["store"].extend([None, fault])  # the tree's part is stored, the first window is not
            served.cache.commit(batch)
        if fault == "hang":
            while not store.hanging:
                served.tiers.poll()
            store.release(fault="error")
        served.flush()
        assert sum(stored(store, served.fingerprint)) < 25
        check_at_rest(served)
        served.compute(PROMPT)
        served.flush()
        assert all(stored(store, served.fingerprint))
        check_at_rest(served)


@pytest.mark.parametrize("gone", [0, 3, 12, 24])
def test_a_load_that_fails_leaves_the_prefix_before_it(gone):
    store = MemoryStore()
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.forget()
        request = served.tiers.request(PROMPT)
        keys = lane_keys(content_chain(served.fingerprint, PROMPT[:100]), 0)
        store.data.pop(keys[gone].tobytes(), None)  # after the look-up
        served.tiers.wait(request, 20.0)
        served.flush()
        usable = request.num_tokens // BLOCK
        assert usable == gone == served.tiers.stats().streams.num_loaded_blocks  # a window has one block
        assert store.counts["load"] <= gone + 3  # what follows is not loaded
        assert store.stats().num_held == 0
        check_at_rest(served)
        assert served.compute(PROMPT) == request.num_tokens
        request.release()


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_a_load_that_is_given_up_holds_nothing(how):
    data = {}
    with Served([MemoryStore(data=data)], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
    store = MemoryStore(data=data)
    with Served([store], stream_blocks=2, **LONG) as served:
        store.faults["load"].extend([None, None, "hang"])
        request = served.tiers.request(PROMPT, deadline=None)
        while not store.hanging:
            served.tiers.poll()
        assert request.state == "loading"
        assert served.tiers.stats().streams.num_leased_blocks
        if how == "cancel":
            request.cancel()
        elif how == "deadline":
            request.deadline_at = 0.0
        else:
            served.tiers.close()
            assert not store.holds
            return
        served.tiers.poll()
        assert (request.state, request.num_tokens >= 2 * BLOCK) == ("late", True)
        loads = store.counts["load"] + len(store.hanging)
        store.release()
        served.flush()
        assert request.is_retired
        assert store.counts["load"] == loads  # no more windows
        assert not store.holds
        check_at_rest(served)
        assert served.compute(PROMPT) >= request.num_tokens
        request.release()


@pytest.mark.parametrize("ends", [True, False])
def test_closing_while_copies_run_gives_every_block_back(world, ends):
    made = world(1, host_type=StreamingHost, device=PlainDevice(), late_copies=True, slots=8, num_slots=4)
    made.host.device.fill(PROMPT)
    made.side.stream("owner", StreamedPrefix(PROMPT[:100], None, None), 0, 0)
    assert made.side.stream_stats().num_leased_blocks == 4
    if ends:
        made.host.finish_copies()
        made.side.poll()
    assert len(made.stores[0].batches) == (4 if ends else 0)

    # The fixture closes the stores, and finds no lease.


def test_closing_while_stores_read_leased_blocks_leaves_nothing():
    store = MemoryStore(manual=True, stubborn=True)
    served = Served([store], **LONG)
    served.compute(PROMPT)
    assert served.tiers.stats().streams.num_leased_blocks == 0  # the host's own blocks are still being read
    while not served.tiers.stats().streams.num_leased_blocks:
        store.release()
        served.tiers.poll()
    host = served.tiers.host
    served.tiers._stores.close(timeout=0.0)
    assert host.num_leases == 0
    host.check_invariants()
    served.tiers.close()


@pytest.mark.parametrize("direction", ["stage", "deliver"])
def test_a_copy_that_fails_leaves_everything_as_it_was(direction, monkeypatch):
    store = MemoryStore()
    with Served([store], **LONG) as served:
        transfers = served.tiers.host._transfers
        name = {"stage": "backup", "deliver": "promote"}[direction]
        real, fails = getattr(type(transfers), name), []

        def failing(self, first, *rest):
            if fails:
                fails.pop()
                raise PagecoreError("planted")
            return real(self, first, *rest)

        monkeypatch.setattr(type(transfers), name, failing)
        if direction == "stage":
            served.compute(PROMPT[:33])  # fills the host
            served.flush()
            fails.append(1)
            with served.tiers.add_sequence(PROMPT) as sequence:
                served.cache.commit(served.cache.prepare([sequence], len(PROMPT) - sequence.num_cached_tokens))
            assert not fails
            served.flush()
            check_at_rest(served)
            assert served.tiers.stats().host.num_failed == 1
            return
        served.compute(PROMPT)
        served.forget()
        fails.append(1)
        request = served.tiers.wait(served.tiers.request(PROMPT), 20.0)
        served.flush()
        assert (request.state, request.num_tokens, fails) == ("ready", 0, [])
        assert served.cache.match_length(PROMPT) == 0
        assert not store.holds
        check_at_rest(served)
        request.release()


def test_threads_that_serve_long_prompts_lose_nothing():
    store = MemoryStore(delay=0.0005)
    with Served([store], num_blocks=80, host_blocks=HOST) as served:
        errors = []

        def serve(base):
            try:
                for number in range(3):
                    served.compute(PROMPT + base + number % 2)
                    served.tiers.poll()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=serve, args=(1000 * n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        served.flush()
        check_at_rest(served)
