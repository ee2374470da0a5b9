"""Memory saver: pages given back to the system, and everything that must hold before and after."""

import os
from pathlib import Path

import numpy as np
import pytest

from pagecore import AttentionSpec, CrossSpec, PagedCacheConfig, PagedKVCache, StateSpec, SwapSpace, make_cache
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from pagecore.storage import HostMemory
from pagecore.storage.state_shapes import delta_planes

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=2)
STATE = StateSpec(delta_planes(2, 4, 8, 8), chunk=4, interval=4)


def make(layers=SPEC, **options):
    return PagedKVCache(
        layers, **{"block_size": 4, "num_blocks": 9, "max_sequences": 4, "memory_saver": True} | options
    )


def resident():
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def step(cache, sequence, count, seed=0):
    batch = cache.prepare([sequence], count)
    values = np.random.default_rng(seed).normal(size=(count, 2, 8)).astype(np.float32)
    cache.write(0, values, values, batch)
    out = np.asarray(cache.attend(0, values, batch)).copy()
    cache.commit(batch)
    return out


def test_released_pages_leave_the_memory_of_the_process():
    size = 96 << 20
    cache = PagedKVCache(AttentionSpec(8, 128, dtype="float32"), memory=size, memory_saver=True)
    before = resident()
    for view in (cache.key(0), cache.value(0)):
        view.numpy()[...] = 1
    full = resident()
    assert full - before > 0.9 * size
    address = cache.key(0).pointer
    assert cache.release_memory() >= 0.99 * size
    released = resident()
    assert full - released > 0.9 * size
    cache.resume_memory()
    assert cache.key(0).pointer == address
    assert resident() - released < 0.1 * size
    assert not cache.key(0).numpy()[1:5].any()


def test_a_cache_computes_the_same_after_a_release_and_nothing_is_reused():
    cache = make()
    sequence = cache.add_sequence(range(10))
    first = step(cache, sequence, 10)
    cache.remove(sequence)
    assert cache.stats().num_cached_blocks > 0
    cache.release_memory()
    cache.check_invariants()
    assert cache.stats().num_cached_blocks == 0
    assert cache.num_available == 8
    cache.resume_memory()
    again = cache.add_sequence(range(10))
    assert again.num_cached_tokens == 0
    np.testing.assert_array_equal(step(cache, again, 10), first)
    cache.check_invariants()


def test_steps_and_swaps_in_are_refused_until_the_memory_is_resumed():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(6))
    step(cache, sequence, 6)
    kept = cache.key(0).numpy()[cache._parts.tables.blocks(sequence.row)].copy()
    cache.swap_out(sequence, space)
    cache.release_memory()
    cache.release_memory()
    waiting = cache.add_sequence(range(3))
    for call in (
        lambda: cache.prepare([waiting], 1),
        lambda: cache.try_prepare([waiting], 1),
        lambda: cache.swap_in(sequence),
        lambda: cache.try_swap_in(sequence),
    ):
        with pytest.raises(DeviceError, match=r"released; call resume_memory\(\)"):
            call()
    cache.check_invariants()
    cache.resume_memory()
    cache.resume_memory()
    cache.swap_in(sequence)
    np.testing.assert_array_equal(cache.key(0).numpy()[cache._parts.tables.blocks(sequence.row)], kept)
    step(cache, waiting, 3)
    cache.check_invariants()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_release_is_refused_while_sequences_hold_blocks_and_changes_nothing(prefix_cache):
    cache = make(prefix_cache=prefix_cache)
    gone, sequence = cache.add_sequence(range(50, 58)), cache.add_sequence(range(6))
    step(cache, gone, 8)
    cache.remove(gone)
    step(cache, sequence, 6)
    cached, content = cache.stats().num_cached_blocks, cache.key(0).numpy().copy()
    with pytest.raises(UnsupportedOption, match="hold 2 blocks and 0 states; remove the sequences"):
        cache.release_memory()
    assert cache.stats().num_cached_blocks == cached
    np.testing.assert_array_equal(cache.key(0).numpy(), content)
    cache.remove(sequence)
    batch = cache.prepare([late := cache.add_sequence(range(3))], 2)  # a step in flight
    with pytest.raises(UnsupportedOption, match="hold 1 blocks"):
        cache.release_memory()
    cache.abandon(batch)
    cache.remove(late)
    again = cache.add_sequence(range(7))  # holds the cached prefix
    if again.num_cached_tokens:
        with pytest.raises(UnsupportedOption, match="hold 1 blocks"):
            cache.release_memory()
    cache.remove(again)
    cache.release_memory()


def test_states_and_encoder_outputs_count_too():
    cache = make([SPEC, STATE], num_states=9)
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 9)
    cache.plane("temporal", 1).numpy()[...] = 1
    cache.commit(batch)
    with pytest.raises(UnsupportedOption, match=r"hold 3 blocks and [1-9] states"):
        cache.release_memory()
    cache.remove(sequence)
    cache.release_memory()
    cache.check_invariants()
    assert not cache.plane("temporal", 1).numpy().any()
    cross = make([SPEC, CrossSpec(2, 8, dtype="float32", num_query_heads=2)], num_blocks=[9, 9])
    sequence = cross.add_sequence(range(3), cross_tokens=5)
    cross.commit(cross.prepare([sequence], 3))
    with pytest.raises(UnsupportedOption, match="hold 3 blocks"):
        cross.release_memory()
    cross.remove(sequence)
    cross.release_memory()


def test_what_a_memory_saver_does_not_serve_is_refused():
    cache = make()
    for tags in (["weights"], "kv weights", [], ["kv", 5], None, 3, np.zeros((2, 2)), np.array(3)):
        for call in (cache.release_memory, cache.resume_memory):
            with pytest.raises(UnsupportedOption, match="a cache has the tag 'kv' alone"):
                call(tags)
    cache.release_memory("kv")
    plain = make(memory_saver=False)
    for call in (plain.release_memory, plain.resume_memory):
        with pytest.raises(UnsupportedOption, match="pass memory_saver=True"):
            call()
    with pytest.raises(UnsupportedOption, match="leave buffers and allocator out"):
        make(allocator=lambda nbytes, device: None)
    with pytest.raises(UnsupportedOption, match="device is 'none'"):
        make(device="none")
    with pytest.raises(UnsupportedOption, match="memory_saver is 1"):
        make(memory_saver=1)
    config = PagedCacheConfig(num_blocks=9, memory_saver=True)
    assert make_cache(config, SPEC).release_memory() > 0
    with pytest.raises(UnsupportedOption, match="memory_saver"):
        PagedCacheConfig(num_blocks=9, memory_saver=None)


@pytest.mark.parametrize("shared", [False, True])
def test_discarded_memory_is_zero(shared):
    memory = HostMemory(1 << 20, shared=shared)
    array = memory.tensor().numpy()
    array[:] = 7
    memory.discard()
    assert not array.any()
    array[5] = 1
    with pytest.raises(ShapeError):
        HostMemory(0)


def test_room_for_long_sequences_takes_memory_when_it_is_used():
    before = resident()
    cache = PagedKVCache(SPEC, num_blocks=9, max_sequences=4, max_tokens_per_sequence=2**31 - 1)
    step(cache, cache.add_sequence(range(20)), 20)
    assert resident() - before < 64 << 20
