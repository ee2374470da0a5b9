"""Blocks that pass between namespaces with scrub=True: no value of one namespace is left for another to read."""

import numpy as np
import pytest

from pagecore import PagedKVCache, SwapSpace
from pagecore.cache import PagedCacheConfig, make_cache
from pagecore.cache.memory.store import Store
from pagecore.errors import ShapeError, UnsupportedOption
from tests.cache.caches import SPEC, WINDOWED, advance, make, owned_memory
from tests.cache.marked import LAYOUTS, MARKERS, compute, dirty, mark, numbers_in_flight, numbers_of
from tests.cache.swaps import Labelled
from tests.together import together


@together("layout", LAYOUTS)
@together("prefix_cache", [True, False])
def test_a_step_finds_no_value_of_another_namespace_in_any_slot(layout, prefix_cache):
    cache = dirty([SPEC, WINDOWED, SPEC], layout=layout, prefix_cache=prefix_cache)
    sequence = cache.add_sequence(range(13), namespace="b")
    batch = cache.prepare([sequence], 13)
    assert numbers_of(cache, sequence) == {0.0}
    query = np.ones((13, 4, 8), np.float32)
    assert all(not np.asarray(cache.attend(layer, query, batch)).any() for layer in range(3))
    mark(cache, batch, MARKERS["b"])
    cache.commit(batch)
    cache.check_invariants()
    assert cache.stats().num_scrubbed_blocks == 8


def test_without_scrub_nothing_is_zeroed_and_values_stay():
    cache = dirty(scrub=False)
    sequence = cache.add_sequence(range(13), namespace="b")
    assert numbers_in_flight(cache, sequence, 13) == {MARKERS["a"]}
    assert (cache.scrub, cache._parts.store._zeros, cache.stats().num_scrubbed_blocks) == (False, [], 0)


def test_planes_of_every_kind_are_zeroed():
    cache = PagedKVCache([Labelled()] * 2, block_size=4, num_blocks=9, max_sequences=4, scrub=True)
    first = cache.add_sequence(range(16), namespace="a")
    compute(cache, [first], 16, 3)
    assert numbers_of(cache, first) == {3.0}
    cache.remove(first)
    cache.clear_prefix_cache()
    second = cache.add_sequence(range(16), namespace="b")
    assert numbers_in_flight(cache, second, 16) == {0.0}


@pytest.mark.parametrize(("one", "other"), [("a", "b"), (None, "a"), ("a", None), (1, True), ((1,), (True,))])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_namespaces_are_equal_only_if_their_types_are_equal_too(one, other, prefix_cache):
    def blocks_zeroed(first, second):
        cache = make(scrub=True, num_blocks=5, prefix_cache=prefix_cache)
        with cache.add_sequence(range(16), namespace=first) as sequence:
            compute(cache, [sequence], 16, 3.0)
        cache.clear_prefix_cache()
        with cache.add_sequence(range(12), namespace=second) as sequence:
            batch = cache.prepare([sequence], 12)
            assert batch.in_flight
            return cache.stats().num_scrubbed_blocks

    assert (blocks_zeroed(one, other), blocks_zeroed(other, one)) == (3, 3)
    assert (blocks_zeroed(one, one), blocks_zeroed(other, other)) == (0, 0)


def test_blocks_of_the_same_namespace_and_new_ones_cost_nothing(monkeypatch):
    calls = []
    zero = Store.zero
    monkeypatch.setattr(Store, "zero", lambda store, *given: (calls.append(given), zero(store, *given)))
    cache = make(scrub=True, num_blocks=9)
    for turn in range(5):
        sequence = cache.add_sequence(range(100 * turn, 100 * turn + 29), namespace="a")
        compute(cache, [sequence], 20, 3.0)
        compute(cache, [sequence], 9, 3.0)
        cache.remove(sequence)
    assert (calls, cache.stats().num_scrubbed_blocks) == ([], 0)
    other = cache.add_sequence(range(4), namespace="b")
    advance(cache, [other], 4)
    assert (len(calls), cache.stats().num_scrubbed_blocks) == (1, 1)


def test_a_decode_step_zeroes_only_the_block_that_it_takes():
    cache = dirty(tokens=32)
    sequence = cache.add_sequence(range(4), namespace="b")
    counts = []
    for _ in range(9):
        compute(cache, [sequence], 1, MARKERS["b"])
        counts.append(cache.stats().num_scrubbed_blocks)
    assert counts == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert numbers_of(cache, sequence) == {0.0, MARKERS["b"]}


def test_a_copy_on_write_leaves_nothing_of_the_last_tenant_of_its_block():
    cache = dirty([SPEC, WINDOWED], tokens=28)
    parent = cache.add_sequence(range(6), namespace="b")
    compute(cache, [parent], 6, MARKERS["b"])
    before = cache.stats()
    child = cache.fork(parent)
    batch = cache.prepare([parent, child], [1, 3])
    after = cache.stats()
    assert (after.num_copied_blocks, after.num_scrubbed_blocks - before.num_scrubbed_blocks) == (2, 2)
    assert numbers_of(cache, parent) == numbers_of(cache, child) == {0.0, MARKERS["b"]}
    cache.commit(batch)
    cache.remove(parent)
    cache.remove(child)
    cache.clear_prefix_cache()
    third = cache.add_sequence(range(28), namespace="a")
    assert numbers_in_flight(cache, third, 28) <= {0.0, MARKERS["a"]}


def test_blocks_that_are_evicted_for_another_namespace_are_zeroed():
    cache = make(scrub=True, num_blocks=9)
    first = cache.add_sequence(range(32), namespace="a")
    compute(cache, [first], 32, MARKERS["a"])
    cache.remove(first)
    assert cache.stats().num_evictable_blocks == 8
    second = cache.add_sequence(range(20), namespace="b")
    assert numbers_in_flight(cache, second, 20) == {0.0}
    assert cache.stats().num_evicted_blocks == 5
    again = cache.add_sequence(range(32), namespace="a")
    assert again.num_cached_tokens == 12
    assert numbers_of(cache, again) == {MARKERS["a"]}, "what is still cached is not touched"


def test_a_reordered_sequence_takes_the_namespace_of_its_parent():
    cache = dirty(tokens=8)
    one = cache.add_sequence(range(2), namespace="a")
    two = cache.add_sequence(range(2), namespace="b")
    compute(cache, [one], 2, MARKERS["a"])
    compute(cache, [two], 2, MARKERS["b"])
    cache.reorder([one], [two])
    batch = cache.prepare([one, two], 8)
    for sequence in (one, two):
        assert numbers_of(cache, sequence) <= {0.0, MARKERS["b"]}
    cache.commit(batch)
    cache.remove(one)
    cache.remove(two)
    cache.clear_prefix_cache()
    last = cache.add_sequence(range(30), namespace="a")
    assert numbers_in_flight(cache, last, 30) <= {0.0, MARKERS["a"]}


# -- swapping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_swapped_blocks_carry_no_value_of_another_namespace_in_either_direction(dtype):
    cache = dirty([SPEC, WINDOWED], tokens=28)
    space = SwapSpace(cache, num_blocks=5, dtype=dtype)
    assert all(not plane.numpy().any() for pool in space.kv_pools for plane in pool.planes())
    first = cache.add_sequence(range(13), namespace="a")
    compute(cache, [first], 13, MARKERS["a"])
    cache.swap_out(first, space)
    cache.remove(first)
    second = cache.add_sequence(range(9), namespace="b")
    compute(cache, [second], 9, MARKERS["b"])
    cache.swap_out(second, space)
    assert numbers_of(cache, second) == {0.0, MARKERS["b"]}
    cache.clear_prefix_cache()
    filler = cache.add_sequence(range(28), namespace="a")
    compute(cache, [filler], 28, MARKERS["a"])
    cache.remove(filler)
    cache.swap_in(second)
    cache.check_invariants()
    assert numbers_of(cache, second) == {0.0, MARKERS["b"]}
    assert numbers_in_flight(cache, second, 7) == {0.0, MARKERS["b"]}
    cache.remove(second)
    cache.clear_prefix_cache()
    third = cache.add_sequence(range(28), namespace="a")
    assert numbers_in_flight(cache, third, 28) <= {0.0, MARKERS["a"]}


# -- what is refused, and what is made -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["layerwise", "CBNHD", "BNHD"])
def test_memory_of_the_caller_is_zeroed_at_adoption_with_scrub_only(layout):
    layers, sizes = [SPEC, WINDOWED, SPEC], {"block_size": 4, "num_blocks": 9, "max_sequences": 4}
    for scrub in (False, True):
        buffers = owned_memory(layers, layout, **sizes)
        cache = PagedKVCache(layers, layout=layout, buffers=buffers, scrub=scrub, **sizes)
        for group in buffers:
            for array in group:
                assert (array == (0 if scrub else 0xFF)).all()
        sequence = cache.add_sequence(range(16), namespace="b")
        assert (numbers_in_flight(cache, sequence, 16) == {0.0}) == scrub


@pytest.mark.parametrize(("wrong", "error"), [({"clock": 5}, UnsupportedOption), ({"max_sequences": 0}, ShapeError)])
def test_a_cache_that_cannot_be_made_leaves_the_callers_memory_unchanged(wrong, error):
    sizes = {"block_size": 4, "num_blocks": 9, "max_sequences": 4}
    buffers = owned_memory([SPEC, WINDOWED], "CBNHD", **sizes)
    with pytest.raises(error):
        PagedKVCache([SPEC, WINDOWED], layout="CBNHD", buffers=buffers, scrub=True, **sizes | wrong)
    with pytest.raises(UnsupportedOption, match="share"):
        PagedKVCache([SPEC, WINDOWED], layout="CBNHD", buffers=[buffers[0], buffers[0]], scrub=True, **sizes)
    assert all((array == 0xFF).all() for group in buffers for array in group)


def test_scrub_is_refused_without_bytes_and_for_spaces_of_caches_without_it():
    with pytest.raises(UnsupportedOption, match="device is 'none'"):
        make(device="none", scrub=True)
    with pytest.raises(UnsupportedOption, match="scrub is 'yes'"):
        make(scrub="yes")
    with pytest.raises(UnsupportedOption, match="scrub is 1;"):
        SwapSpace(make(scrub=True), num_blocks=5, scrub=1)
    for device in ("cpu", "none"):
        with pytest.raises(UnsupportedOption, match="scrub=False"):
            SwapSpace(make(device=device), num_blocks=5, scrub=True)
    assert SwapSpace(make(scrub=True), num_blocks=5, scrub=False).num_available == 4


def test_scrub_is_an_option_of_configs():
    assert make_cache(PagedCacheConfig(num_blocks=5, scrub=np.True_), SPEC).scrub is True
    assert PagedCacheConfig(num_blocks=5) != PagedCacheConfig(num_blocks=5, scrub=True)
    with pytest.raises(UnsupportedOption, match="device is 'none'"):
        PagedCacheConfig(device="none", scrub=True)


def test_tenants_without_a_block_are_forgotten():
    cache = make(scrub=True, num_blocks=5)
    held = cache.add_sequence(range(4), namespace="held")
    compute(cache, [held], 4, 3.0)
    for number in range(10_000):
        cache.remove(cache.add_sequence([1], namespace=("tenant", number)))
    assert len(cache._parts.state.tenants.numbers) <= 5000
    batch = cache.prepare([held], 12)
    cache.commit(batch)
    assert cache.stats().num_scrubbed_blocks == 0
    cache.check_invariants()


def test_a_step_without_tokens_zeroes_nothing():
    cache = dirty()
    sequence = cache.add_sequence(range(4), namespace="b")
    advance(cache, [sequence], 0)
    assert cache.stats().num_scrubbed_blocks == 0
