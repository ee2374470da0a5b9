"""Loads of prompts longer than the host tier: order, shared requests, ranks, and stores one after another."""

import threading

import numpy as np

from pagecore.tiers.keys import content_chain, lane_keys
from tests.tiers.manager.long_prompts import HOST, LONG, PROMPT, stored
from tests.tiers.manager.served import BLOCK, Served
from tests.tiers.memory_store import MemoryStore


def test_a_block_that_a_store_has_lost_is_streamed_again_after_a_look_up():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.forget()
        keys = lane_keys(content_chain(served.fingerprint, PROMPT[:100]), 0)
        del store.data[keys[20].tobytes()]
        assert served.serve(PROMPT).num_tokens == 80
        served.flush()
        assert all(stored(store, served.fingerprint))


def test_a_busy_device_loads_to_the_host_what_it_has_room_for():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.forget()
        other = np.arange(1000, 1141, dtype=np.int32)  # 36 of 39 blocks
        with served.tiers.add_sequence(other) as sequence:
            served.cache.commit(served.cache.prepare([sequence], len(other)))
            served.flush()
            request = served.tiers.wait(served.tiers.request(PROMPT), 20.0)
            assert served.tiers.host.match(PROMPT) == request.num_tokens == (HOST - 1) * BLOCK
            request.release()
        served.tiers.check_invariants()


def test_what_the_host_has_of_a_prefix_comes_before_the_windows():
    data = {}
    with Served([MemoryStore(data=data)], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
        served.cache.clear_prefix_cache()
        assert 0 < served.tiers.host.match(PROMPT) < 100
        there = served.tiers.host.match(PROMPT)
        request = served.serve(PROMPT)
        assert (request.num_tokens, request.num_host_tokens) == (100, there)
        assert request.loaded_tokens == {"EXTERNAL": 100 - there}
        assert served.tiers.stats().hit_tokens == {"GPU": 0, "CPU": there, "EXTERNAL": 100 - there}


def test_two_requests_for_one_long_prompt_load_it_once():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.forget()
        first, second = (served.tiers.request(PROMPT) for _ in range(2))
        for request in (first, second):
            served.tiers.wait(request, 20.0)
            assert request.num_tokens == 100
        assert store.counts["load"] == 25
        assert served.compute(PROMPT) == 100
        first.release()
        second.release()


def test_loads_from_a_far_store_reach_the_near_one():
    far, near = {}, {}
    with Served([MemoryStore(data=far)], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
    with Served([MemoryStore(data=near, medium="DISK"), MemoryStore(data=far)], **LONG) as served:
        assert served.serve(PROMPT).num_tokens == 100
        served.flush()
        assert near == far


def test_a_cache_that_writes_on_eviction_loads_long_prompts():
    data = {}
    with Served([MemoryStore(data=data)], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
    with Served([MemoryStore(data=data)], write="on_evict", **LONG) as served:
        served.compute(PROMPT[:61] + 2000)
        assert served.serve(PROMPT).num_tokens == 100
        served.compute(PROMPT[:61] + 3000)
        served.tiers.check_invariants()


def test_ranks_end_a_long_load_with_the_shortest_prefix():
    data, ends = {}, [None, None]
    with Served([MemoryStore(data=data)], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
        lost = lane_keys(content_chain(served.fingerprint, PROMPT[:100]), 0)[15].tobytes()
    barrier, offers = threading.Barrier(2, timeout=20), [None, None]

    def rank(number):
        def agree(values):
            offers[number] = values.copy()
            barrier.wait()
            least = np.minimum(*offers)
            barrier.wait()
            return least

        own = {key: payload for key, payload in data.items() if number == 0 or key != lost}
        with Served([MemoryStore(data=own)], agree=agree, **LONG) as served:
            request = served.tiers.request(PROMPT)
            while not request.has_ended:
                served.tiers.poll()
            ends[number] = request.num_tokens, served.compute(PROMPT)
            request.release()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [(60, 60), (60, 60)]
