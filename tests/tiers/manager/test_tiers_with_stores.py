"""Tiers over a cache with bytes: prompts that device and host have forgotten come back from stores."""

import threading

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers
from tests.tiers.manager.served import BLOCK, LAYERS, WINDOWED, Served
from tests.tiers.memory_store import MemoryStore

PROMPT = np.arange(33, dtype=np.int32)


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["full", "window"])
def test_a_forgotten_prompt_comes_back_from_a_store(layers):
    with Served([MemoryStore(medium="DISK")], layers=layers) as served:
        first = served.serve(PROMPT)
        assert (first.num_tokens, served.computed) == (0, 33)
        served.forget()
        again = served.serve(PROMPT)
        assert (again.num_tokens, again.loaded_tokens, again.error) == (32, {"DISK": 32}, None)
        assert (served.reused, served.computed) == (32, 34)
        assert served.tiers.stats().hit_tokens == {"GPU": 0, "CPU": 0, "DISK": 32}


def test_a_forgotten_prompt_of_the_device_comes_back_from_the_host():
    with Served() as served:
        served.serve(PROMPT)
        served.cache.clear_prefix_cache()
        request = served.serve(PROMPT)
        assert (request.state, request.num_host_tokens) == ("ready", 32)
        assert served.tiers.stats().hit_tokens == {"GPU": 0, "CPU": 32}
        served.serve(PROMPT)
        assert served.tiers.stats().hit_tokens == {"GPU": 32, "CPU": 32}


def test_two_processes_share_a_store():
    data = {}
    with Served([MemoryStore(data=data)]) as writer:
        writer.serve(PROMPT)
        writer.serve(PROMPT[:17], namespace="tenant")
        writer.flush()
    with Served([MemoryStore(data=data)]) as reader:
        assert reader.serve(PROMPT).num_tokens == 32
        assert reader.serve(PROMPT, namespace="tenant").num_tokens == 16


def test_another_model_finds_nothing():
    data = {}
    with Served([MemoryStore(data=data)]) as writer:
        writer.serve(PROMPT)
        writer.flush()
    with Served([MemoryStore(data=data)], model="other") as reader:
        assert reader.serve(PROMPT).num_tokens == 0


def test_explicit_writes_reach_host_and_store_by_save():
    store = MemoryStore()
    with Served([store], write="explicit") as served:
        served.serve(PROMPT)
        served.flush()
        assert not store.data
        with served.tiers.add_sequence(PROMPT) as sequence:
            assert served.tiers.save(sequence) == 8
        served.flush()
        assert len(store.data) == 8
        store.data.clear()
        with served.tiers.add_sequence(PROMPT) as sequence:
            assert served.tiers.save([sequence]) == 0
        served.flush()
        assert len(store.data) == 8


@pytest.mark.parametrize("write", ["through", "second_hit", "on_release"])
def test_write_policies_decide_when_stores_are_written(write):
    store = MemoryStore()
    with Served([store], write=write) as served:
        served.serve(PROMPT)
        served.flush()
        assert len(store.data) == (0 if write == "second_hit" else 8)
        served.serve(PROMPT)
        served.flush()
        assert len(store.data) == 8


def test_a_prompt_longer_than_the_device_is_served_in_part():
    tokens = np.arange(BLOCK * 20 + 1, dtype=np.int32)
    store = MemoryStore()
    with Served([store], num_blocks=23, host_blocks=41) as served:
        served.serve(tokens)
        served.forget()
        assert served.serve(tokens).num_tokens == 80


def test_requests_from_several_threads():
    store = MemoryStore(delay=0.002)
    with Served([store], num_blocks=65, host_blocks=65) as served:
        prompts = [PROMPT + 100 * number for number in range(6)]
        for tokens in prompts:
            served.serve(tokens)
        served.forget()
        requests = []

        def ask(tokens):
            requests.append(served.tiers.wait(served.tiers.request(tokens), 20.0))

        threads = [threading.Thread(target=ask, args=[tokens]) for tokens in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [request.num_tokens for request in requests] == [32] * 6
        for tokens in prompts:
            assert served.compute(tokens) == 32


def test_refusals_change_nothing():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=BLOCK)
    host = HostTier(cache, num_blocks=9)
    other = PagedKVCache(AttentionSpec(2, 8), num_blocks=9, block_size=BLOCK)
    store = MemoryStore()
    with pytest.raises(UnsupportedOption, match="fingerprint"):
        Tiers(cache, host, [store])
    with pytest.raises(ShapeError, match=r"Fingerprint\.of"):
        Tiers(cache, host, [store], fingerprint=Fingerprint.of(other, model="m"))
    with Tiers(cache, host, [store], fingerprint=Fingerprint.of(cache, model="m")) as tiers:
        with pytest.raises(UnsupportedDtype, match="outside this process"):
            tiers.request(range(9), namespace=frozenset([1]))
        with pytest.raises(ShapeError, match="deadline"):
            tiers.request(range(9), deadline=float("nan"))
        assert tiers.stats().requests.num_requests == 0
        tiers.check_invariants()
    with pytest.raises(UnsupportedOption, match="closed"):
        tiers.request(range(9))


def test_a_namespace_without_a_value_of_its_own_stays_in_the_process():
    store = MemoryStore()
    with Served([store]) as served:
        served.compute(PROMPT, frozenset([1]))
        served.flush()
        assert not store.data
        served.cache.clear_prefix_cache()
        assert served.compute(PROMPT, frozenset([1])) == 32
