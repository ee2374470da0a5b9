"""EmbeddingCache against a plain model: budget, order of eviction, pins and counters."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import EmbeddingCache, empty
from pagecore.errors import InvalidSequence, NotEnoughMemory, PagecoreError, ShapeError, UnsupportedDtype
from tests.capabilities import require


def of(nbytes):
    return np.zeros(nbytes, np.uint8)


def test_worked_example_23():
    cache = EmbeddingCache(10)
    for key in "abc":
        cache.put(key, of(4))
    assert "a" not in cache
    assert cache.get("a") is None
    assert cache.nbytes == 8
    with pytest.raises(NotEnoughMemory, match="the value has 11 bytes; the cache holds 10"):
        cache.put("d", of(11))
    assert ("b" in cache, "c" in cache, "d" in cache, cache.nbytes, len(cache)) == (True, True, False, 8, 2)


class Model:
    """A list of (key, bytes, pins), least recently used first."""

    def __init__(self, most):
        self.most, self.entries, self.hits, self.misses = most, [], 0, 0

    def find(self, key):
        return next((entry for entry in self.entries if entry[0] == key), None)

    def used(self, entry):
        self.entries.remove(entry)
        self.entries.append(entry)

    def put(self, key, nbytes):
        entry = self.find(key)
        if entry is not None:
            self.used(entry)
            return []
        if nbytes + sum(e[1] for e in self.entries if e[2]) > self.most:
            return None
        dropped = []
        while sum(e[1] for e in self.entries) + nbytes > self.most:
            dropped.append(next(e for e in self.entries if not e[2]))
            self.entries.remove(dropped[-1])
        self.entries.append([key, nbytes, 0])
        return [key for key, *_ in dropped]


CALLS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "pin", "unpin", "clear"]), st.integers(0, 5), st.integers(0, 12)),
    max_size=40,
)


@pytest.mark.slow
@given(CALLS)
@settings(deadline=None, max_examples=150)
def test_the_cache_agrees_with_a_list(calls):
    cache, model = EmbeddingCache(20), Model(20)
    for call, key, nbytes in calls:
        entry = model.find(key)
        if call == "put":
            dropped = model.put(key, nbytes)
            if dropped is not None:
                assert cache.put(key, of(nbytes)) == dropped
            else:
                with pytest.raises(NotEnoughMemory):
                    cache.put(key, of(nbytes))
        elif call in ("get", "pin"):
            value = getattr(cache, call)(key)
            assert (value is not None) == (entry is not None)
            model.hits, model.misses = model.hits + (entry is not None), model.misses + (entry is None)
            if entry is not None:
                assert value.nbytes == entry[1]
                model.used(entry)
                entry[2] += call == "pin"
        elif call == "unpin":
            if entry is None or not entry[2]:
                with pytest.raises(InvalidSequence, match="is not pinned"):
                    cache.unpin(key)
            else:
                cache.unpin(key)
                entry[2] -= 1
                model.used(entry)
        else:
            freed = cache.clear()
            assert freed == sum(e[1] for e in model.entries if not e[2])
            model.entries = [e for e in model.entries if e[2]]
        cache.check_invariants()
        assert [key for _, key in cache._entries] == [e[0] for e in model.entries]
        assert (cache.num_hits, cache.num_misses) == (model.hits, model.misses)
        assert cache.nbytes == sum(e[1] for e in model.entries)
        assert cache.available_bytes == 20 - sum(e[1] for e in model.entries if e[2])


def test_the_end_of_a_use_makes_a_value_the_most_recently_used():
    cache = EmbeddingCache(10)
    cache.put("long", of(4))
    with cache.use("long"):
        cache.put("short", of(4))
    cache.put("new", of(4))
    assert ("long" in cache, "short" in cache) == (True, False)


def test_a_value_in_use_stays():
    cache = EmbeddingCache(10)
    cache.put(1, of(4))
    with cache.use(1) as value:
        cache.put(2, of(6))
        cache.put(3, of(6))
        assert (1 in cache, 2 in cache) == (True, False)
        with pytest.raises(NotEnoughMemory, match="of which 4 are in use"):
            cache.put(4, of(7))
        assert value.nbytes == 4
    cache.put(4, of(10))
    assert 1 not in cache
    with cache.use("absent") as value:
        assert value is None
    assert cache.num_evictions == 3


def test_keys_of_different_types_differ():
    cache = EmbeddingCache("1KiB")
    cache.put(1, of(1))
    cache.put("1", of(2))
    cache.put(b"1", of(3))
    assert [cache.get(key).nbytes for key in (1, "1", b"1")] == [1, 2, 3]
    for key in (True, 1.0, None, ("a",)):
        with pytest.raises(UnsupportedDtype, match="expected bytes, an int or a str"):
            cache.put(key, of(1))


def test_arrays_of_any_framework_are_kept_as_they_are():
    torch = require("torch")
    cache = EmbeddingCache(1 << 20)
    values = [torch.zeros(3, 5), (of(7), torch.zeros(2)), empty((4, 4), "bfloat16"), [of(1)]]
    for key, value in enumerate(values):
        cache.put(key, value)
        assert cache.get(key) is value
    assert cache.nbytes == 60 + 15 + 32 + 1
    with pytest.raises(PagecoreError):
        cache.put("text", "not an array")
    for wrong in (-1, "many", None):
        with pytest.raises(ShapeError, match="max_bytes is"):
            EmbeddingCache(wrong)


def test_threads_keep_the_budget():
    cache = EmbeddingCache(64)

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(300):
            key = int(random.integers(0, 12))
            with cache.use(key) as value:
                if value is None:
                    cache.put(key, of(int(random.integers(1, 12))))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.check_invariants()
    assert not any(entry.num_pins for entry in cache._entries.values())
