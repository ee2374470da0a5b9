"""Blocks that pass between namespaces with scrub=True: no value of one namespace is left for another to read."""

import numpy as np
import pytest
from hypothesis import settings

from pagecore import AttentionSpec, KVLayout, PagedKVCache, SwapSpace
from pagecore.cache import PagedCacheConfig, make_cache
from pagecore.cache.memory.store import Store
from pagecore.cache.swap._swap import stored_blocks
from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from tests.cache import test_prefix_machine
from tests.cache.caches import SPEC, WINDOWED, advance, make, owned_memory
from tests.cache.swaps import Labelled
from tests.faults import is_full, lines_of, raise_at
from tests.machines import drawn
from tests.together import together

LAYOUTS = ["layerwise", "blockwise", KVLayout("blockwise", "NHD"), "BNHD", "BHND", "CBNHD", "LBNHD", "NBHD"]
MARKERS = {"a": 3.0, "b": 5.0}


def marked_step(cache, sequences, counts, marker, **options):
    """Prepare a step and write a marker to every plane of its slots."""
    batch = cache.prepare(sequences, counts, **options)
    mark(cache, batch, marker)
    return batch


def mark(cache, batch, marker, tokens=slice(None)):
    """Write a marker to the slots of some tokens of a step, in every plane of every layer."""
    for group, pool in enumerate(cache._parts.store.pools):
        slots = np.asarray(batch.host.slot_mappings[group])[: batch.num_tokens][tokens]
        slots = slots[slots >= 0]
        for plane in pool.planes():
            array = plane.numpy()
            if array.shape[1:2] == (cache.block_size,):
                array[slots // cache.block_size, slots % cache.block_size] = marker
            else:
                array[slots // cache.block_size] = marker


def compute(cache, sequences, counts, marker, **options):
    cache.commit(marked_step(cache, sequences, counts, marker, **options))


def numbers_of(cache, sequence):
    """Return all values in all slots of a sequence's blocks, including spare ones, in every plane and layer."""
    if sequence.is_swapped:
        pools, rows = sequence.swap_space.kv_pools, stored_blocks(sequence)
    else:
        tables = [cache._parts.tables.blocks(sequence.row, group) for group in range(cache.num_groups)]
        pools, rows = cache._parts.store.pools, tables
    found = set()
    for pool, row in zip(pools, rows, strict=True):
        for plane in pool.planes():
            found |= set(np.unique(plane.numpy()[row[row != 0]].astype(np.float64)).tolist())
    return found


def numbers_in_flight(cache, sequence, count):
    """Return the values in a sequence's blocks after a step has taken blocks and before it writes."""
    batch = cache.prepare([sequence], count)
    found = numbers_of(cache, sequence)
    assert batch.in_flight
    return found


def dirty(layers=SPEC, *, tokens=16, **options):
    """Return a cache whose free blocks a removed sequence of another namespace has filled with a marker."""
    cache = make(layers, **{"scrub": True, "num_blocks": 9} | options)
    sequence = cache.add_sequence(range(tokens), namespace="a")
    compute(cache, [sequence], tokens, MARKERS["a"])
    assert numbers_of(cache, sequence) == {MARKERS["a"]}
    cache.remove(sequence)
    cache.clear_prefix_cache()
    return cache


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


def test_blocks_that_a_failed_swap_in_half_filled_are_zeroed_for_every_namespace(monkeypatch):
    cache = make(scrub=True, num_blocks=9)
    space = SwapSpace(cache, num_blocks=9)
    second = cache.add_sequence(range(9), namespace="b")
    compute(cache, [second], 9, MARKERS["b"])
    cache.swap_out(second, space)
    cache.clear_prefix_cache()
    first = cache.add_sequence(range(32), namespace="a")
    compute(cache, [first], 32, MARKERS["a"])
    cache.remove(first)

    def half_moved(sources, targets, pairs, **options):
        for target in targets[:1]:
            target.numpy()[pairs[:, 1]] = MARKERS["b"]
        raise NotEnoughMemory("the copy stopped half-way")

    cache.clear_prefix_cache()
    with monkeypatch.context() as broken:
        broken.setattr("pagecore.cache.swap._swap.transfer_blocks", half_moved)
        with pytest.raises(NotEnoughMemory, match="half-way"):
            cache.swap_in(second)
    assert second.is_swapped
    again = cache.add_sequence(range(32), namespace="a")
    assert numbers_in_flight(cache, again, 32) <= {0.0, MARKERS["a"]}
    assert cache.stats().num_scrubbed_blocks == 6, "3 of them were b's before a filled them"


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_step_whose_blocks_cannot_be_zeroed_is_undone(monkeypatch):
    cache = dirty([SPEC, WINDOWED])
    sequence = cache.add_sequence(range(13), namespace="b")
    before = cache.stats()
    with monkeypatch.context() as broken:

        def refuse(*given):
            raise NotEnoughMemory("nothing was zeroed")

        broken.setattr(Store, "zero", refuse)
        with pytest.raises(NotEnoughMemory, match="nothing was zeroed"):
            cache.prepare([sequence], 13)
    assert (cache.stats(), sequence.num_computed_tokens) == (before, 0)
    cache.check_invariants()
    assert numbers_in_flight(cache, sequence, 13) == {0.0}


def test_the_target_of_a_copy_that_failed_is_zeroed_for_its_last_tenant_too(monkeypatch):
    cache = dirty(tokens=32)
    parent = cache.add_sequence(range(6), namespace="b")
    compute(cache, [parent], 6, MARKERS["b"])
    child = cache.fork(parent)

    def half_copied(store, group, pairs, *stream):
        store.pools[group].key(0).numpy()[pairs[:, 1]] = MARKERS["b"]
        raise NotEnoughMemory("the copy stopped half-way")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "copy", half_copied)
        with pytest.raises(NotEnoughMemory, match="half-way"):
            cache.prepare([child], 1)
    cache.remove(child)
    cache.remove(parent)
    cache.clear_prefix_cache()
    again = cache.add_sequence(range(32), namespace="a")
    assert numbers_in_flight(cache, again, 32) == {0.0, MARKERS["a"]}


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_step_leaves_no_value_of_another_namespace():
    def ready():
        cache = dirty([SPEC, WINDOWED], tokens=28)
        parent = cache.add_sequence(range(6), namespace="b")
        compute(cache, [parent], 6, MARKERS["b"])
        child = cache.fork(parent)
        return cache, parent, child, lambda: cache.prepare([parent, child], [5, 9])

    total = lines_of(ready()[-1])
    for n in range(1, total + 1):
        cache, parent, child, call = ready()
        run = raise_at(call, n, error=KeyboardInterrupt)
        assert run.reached
        cache.check_invariants()
        assert numbers_of(cache, parent) | numbers_of(cache, child) <= {0.0, MARKERS["b"]}
        with child, parent:
            assert numbers_in_flight(cache, parent, 5) <= {0.0, MARKERS["b"]}
            assert numbers_in_flight(cache, child, 9) <= {0.0, MARKERS["b"]}
        cache.clear_prefix_cache()
        last = cache.add_sequence(range(28), namespace="a")
        assert numbers_in_flight(cache, last, 28) <= {0.0, MARKERS["a"]}


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


# -- at random -------------------------------------------------------------------------------------------------------

NAMES = [None, "a", "b", 1, True]


def shown_marker(namespace):
    return 1.0 + [(type(name), name) for name in NAMES].index((type(namespace), namespace))


@pytest.mark.parametrize("seed", range(12))
def test_rows_hold_no_value_of_another_namespace_throughout_a_random_walk(seed):
    random = np.random.default_rng(seed)
    layers = [[SPEC], [SPEC, WINDOWED], [WINDOWED, AttentionSpec(1, 4, 8, dtype="float16", num_query_heads=1)]][
        seed % 3
    ]
    cache = make(
        layers,
        num_blocks=12,
        max_sequences=6,
        scrub=True,
        layout=LAYOUTS[seed % len(LAYOUTS)],
        prefix_cache=seed % 4 > 0,
    )
    space, tenants = SwapSpace(cache, num_blocks=8), {}

    def pick(is_swapped=False):
        among = [one for one in tenants if one.is_swapped == is_swapped]
        count = min(len(among), int(random.integers(1, 3)))
        return [among[i] for i in random.permutation(len(among))[:count]]

    def add():
        if cache.num_sequences < 6:
            namespace = NAMES[random.integers(len(NAMES))]
            tenants[cache.add_sequence(random.integers(0, 2, random.integers(0, 30)), namespace=namespace)] = namespace

    def step():
        listed = pick()
        counts = [int(random.integers(0, 12)) for _ in listed]
        fits = all(one.num_computed_tokens + n <= 44 for one, n in zip(listed, counts, strict=True))
        batch = cache.try_prepare(listed, counts) if fits else None
        if batch is None:
            return
        expect()
        begin = 0
        for one, count in zip(listed, counts, strict=True):
            if random.random() < 0.7:
                mark(cache, batch, shown_marker(tenants[one]), slice(begin, begin + count))
            begin += count
        if random.random() < 0.3:
            cache.abandon(batch)
            return
        if random.random() < 0.1 and listed:
            remove(listed[0])
        cache.commit(batch, [int(random.integers(0, n + 1)) for n in counts] if random.random() < 0.4 else None)

    def fork():
        if pick() and cache.num_sequences < 6:
            parent = pick()[0]
            tenants[cache.fork(parent)] = tenants[parent]

    def reorder():
        listed = pick()
        parents = [pick()[0] for _ in listed]
        cache.reorder(listed, parents)
        tenants.update(dict(zip(listed, [tenants[one] for one in parents], strict=True)))

    def truncate():
        for one in pick():
            try:
                cache.truncate(one, int(random.integers(0, max(one.num_tokens, one.num_computed_tokens) + 1)))
            except UnsupportedOption:
                assert cache.num_groups > 0

    def remove(one=None):
        for gone in [one] if one else pick(is_swapped=random.random() < 0.3):
            cache.remove(gone)
            del tenants[gone]

    def expect():
        cache.check_invariants()
        for one, namespace in tenants.items():
            assert numbers_of(cache, one) <= {0.0, shown_marker(namespace)}

    moves = [add, add, step, step, step, step, fork, reorder, truncate, remove]
    moves += [lambda: cache.try_swap_out(pick(), space), lambda: cache.try_swap_in(pick(is_swapped=True))]
    moves += [lambda: cache.clear_prefix_cache() if random.random() < 0.2 else None]
    for _ in range(250 if is_full() else 120):
        moves[random.integers(len(moves))]()
        expect()
    assert cache.stats().num_scrubbed_blocks > 0


class ScrubbedMachine(test_prefix_machine.PrefixMachine):
    """Assert that a zeroed block is never one that a sequence or the prefix cache still holds."""

    def make_cache(self, layers, **options):
        return PagedKVCache(layers, **options, scrub=True)


TestScrubbedMachine = pytest.mark.slow(drawn(ScrubbedMachine))
TestScrubbedMachine.settings = settings(max_examples=40 if is_full() else 15, stateful_step_count=40, deadline=None)


def test_a_step_without_tokens_zeroes_nothing():
    cache = dirty()
    sequence = cache.add_sequence(range(4), namespace="b")
    advance(cache, [sequence], 0)
    assert cache.stats().num_scrubbed_blocks == 0
