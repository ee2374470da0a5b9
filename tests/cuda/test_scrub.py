"""Caches on CUDA with scrub=True: blocks are zeroed in the order of the step's stream when they change hands."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import AttentionSpec, KVPool, PagedKVCache, SwapSpace
from pagecore.cache.memory.store import Store
from pagecore.cache.swap._swap import stored_blocks
from pagecore.errors import DeviceError
from tests.cache.caches import owned_memory
from tests.cache.test_prefix_machine import PrefixMachine
from tests.cuda.caches import on_host, requests_of, run_machine
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases

LAYERS = [AttentionSpec(2, 8, dtype="float32", num_query_heads=4)] * 2
LAYERS += [AttentionSpec(1, 16, 4, dtype="bfloat16", num_query_heads=2, window=6)]
SIZES = {"block_size": 4, "num_blocks": [12, 12], "max_sequences": 4}


def make(cuda: Kit, layers=None, **options):
    return PagedKVCache(layers or LAYERS, **SIZES | {"device": cuda.device, "scrub": True} | options)


def compute(cuda: Kit, cache, sequence, count, marker, stream=None):
    """Write a marker in every layer in one step; return its batch, which the caller keeps until the stream is done."""
    batch = cache.prepare([sequence], count, stream=stream)
    for layer in range(cache.num_layers):
        sides = [
            np.full((count, *side.shape[2:]), marker, np.float32) for side in (cache.key(layer), cache.value(layer))
        ]
        cache.write(layer, *(cuda.put(side) for side in sides), batch, stream=stream)
    cache.commit(batch)
    return batch


def numbers_of(cuda: Kit, cache, sequence):
    """Return the distinct numbers in all slots of a sequence's blocks, after all work of stream 0."""
    if sequence.is_swapped:
        pools, rows = sequence.swap_space.kv_pools, stored_blocks(sequence)
    else:
        rows = [cache._parts.tables.blocks(sequence.row, group) for group in range(cache.num_groups)]
        pools = cache._parts.store.pools
    cuda.runtime.synchronize(0)
    return {
        number
        for pool, row in zip(pools, rows, strict=True)
        for plane in on_host(cuda, pool).planes()
        for number in np.unique(plane.numpy()[row[row != 0]].astype(np.float64)).tolist()
    }


def fill_and_remove(cuda: Kit, cache, marker, count=40, namespace="a", stream=None):
    """Fill blocks in a namespace, then remove the sequence and its cached prefix."""
    sequence = cache.add_sequence(range(count), namespace=namespace)
    kept = compute(cuda, cache, sequence, count, marker, stream)
    cache.remove(sequence)
    cache.clear_prefix_cache()
    return kept


@pytest.mark.parametrize("layout", cases(["layerwise", "BNHD"], ["layerwise", "blockwise", "BNHD", "CBNHD", "NBHD"]))
def test_the_blocks_of_a_step_hold_no_number_of_another_namespace(cuda, layout):
    cache = make(cuda, layout=layout)
    fill_and_remove(cuda, cache, 3.0)
    sequence = cache.add_sequence(range(13), namespace="b")
    batch = cache.prepare([sequence], 13)
    assert numbers_of(cuda, cache, sequence) == {0.0}
    query = cuda.put(np.ones((13, 4, 8), np.float32))
    assert not cuda.get(cache.attend(0, query, batch)).any()
    cache.abandon(batch)
    other = cache.add_sequence(range(13), namespace="a")
    compute(cuda, cache, other, 13, 5.0)
    assert numbers_of(cuda, cache, other) <= {0.0, 3.0, 5.0}


def test_many_blocks_are_zeroed_in_stream_order_and_the_host_does_not_wait(cuda):
    layers = [AttentionSpec(1, 8, dtype="float32", num_query_heads=1)]
    cache, stream = make(cuda, layers, num_blocks=170), cuda.stream()
    other = cache.make_batch(1, 160 * 4)
    fill_and_remove(cuda, cache, 3.0, 160 * 4, stream=stream)
    sequence = cache.add_sequence(range(160 * 4), namespace="b")
    spent = requests_of(cuda, lambda: cache.prepare([sequence], 160 * 4, other, stream=stream))
    assert not {"synchronizes", "event_synchronizes", "allocations", "pinned_allocations"} & set(spent)
    cuda.runtime.synchronize(stream)
    assert numbers_of(cuda, cache, sequence) == {0.0}
    assert cache.stats().num_scrubbed_blocks == 160


def test_copies_on_write_come_after_the_blocks_that_are_zeroed(cuda):
    cache = make(cuda)
    fill_and_remove(cuda, cache, 3.0)
    parent = cache.add_sequence(range(6), namespace="b")
    kept = compute(cuda, cache, parent, 6, 5.0)
    child = cache.fork(parent)
    batch = cache.prepare([parent, child], [1, 5])
    assert cache.stats().num_copied_blocks == 2
    assert numbers_of(cuda, cache, parent) == numbers_of(cuda, cache, child) == {0.0, 5.0}
    for group in range(2):
        row = cache._parts.tables.blocks(child.row, group)
        host = on_host(cuda, cache._parts.store.pools[group])
        assert all((plane.numpy()[row[0]] == 5.0).all() for plane in host.planes())
        assert all((plane.numpy()[row[1], :2] == 5.0).all() for plane in host.planes())
    del kept, batch


def test_swapped_blocks_carry_no_number_of_another_namespace_in_or_out(cuda):
    cache = make(cuda)
    space = SwapSpace(cache, num_blocks=8)
    cuda.runtime.synchronize(0)
    assert all(not buffer.numpy().any() for pool in space.kv_pools for buffer in on_host(cuda, pool).buffers)
    kept = [fill_and_remove(cuda, cache, 3.0)]
    sequence = cache.add_sequence(range(9), namespace="b")
    kept.append(compute(cuda, cache, sequence, 9, 5.0))
    cache.swap_out(sequence, space)
    assert numbers_of(cuda, cache, sequence) == {0.0, 5.0}
    cache.clear_prefix_cache()
    kept.append(fill_and_remove(cuda, cache, 3.0))
    cache.swap_in(sequence)
    batch = cache.prepare([sequence], 10)
    assert numbers_of(cuda, cache, sequence) == {0.0, 5.0}
    cache.commit(batch)
    cache.remove(sequence)
    cache.clear_prefix_cache()
    last = cache.add_sequence(range(40), namespace="a")
    batch = cache.prepare([last], 40)
    assert numbers_of(cuda, cache, last) <= {0.0, 3.0}


def test_a_step_whose_blocks_cannot_be_zeroed_is_undone(cuda, monkeypatch):
    cache = make(cuda)
    fill_and_remove(cuda, cache, 3.0)
    sequence, batch = cache.add_sequence(range(13), namespace="b"), cache.make_batch(1, 13)
    before = cache.stats()

    def refuse(*given):
        raise DeviceError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "zero", refuse)
        with pytest.raises(DeviceError, match="gone"):
            cache.prepare([sequence], 13, batch)
    assert (cache.stats(), batch.in_flight) == (before, False)
    cache.check_invariants()
    cache.prepare([sequence], 13, batch)
    assert numbers_of(cuda, cache, sequence) == {0.0}


def test_adopted_memory_is_zeroed_only_with_scrub(cuda):
    for scrub in (False, True):
        buffers = owned_memory(LAYERS, "CBNHD", cuda.put, **SIZES)
        make(cuda, layout="CBNHD", buffers=buffers, scrub=scrub)
        for group in buffers:
            for array in group:
                assert (cuda.get(array) == (0 if scrub else 0xFF)).all()


def test_a_pool_is_not_zeroed_in_a_graph(cuda, monkeypatch):
    pool = KVPool(LAYERS[0], 1, 4, 4, "CBNHD", cuda.device, cuda.put(np.full(2048, 7, np.uint8)))

    def work(stream):
        if cuda.is_emulated:
            monkeypatch.setattr(cuda.runtime, "current_stream", lambda device: stream)
        with pytest.raises(DeviceError, match="captured"):
            pool.zero()

    cuda.capture(work)
    monkeypatch.undo()
    assert (cuda.get(pool.buffers[0]) == 7).all()
    pool.zero()
    assert not cuda.get(pool.buffers[0]).any()


@pytest.mark.slow
def test_a_cache_that_scrubs_reuses_prefixes_as_its_model(cuda):
    run_machine(PrefixMachine, cuda, *cases((20, 30), (100, 50)), lambda layers, **options: {"scrub": True})
