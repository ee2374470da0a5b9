"""Memory saver on CUDA: memory is unmapped and mapped again at the same addresses, on a runtime over host memory."""

import ctypes
import gc

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, StateSpec
from pagecore.arrays.cuda.current import use_runtime
from pagecore.errors import DeviceError, NotEnoughMemory, UnsupportedOption
from pagecore.storage.state_shapes import delta_planes
from tests.arrays.fake_runtime import FakeRuntime

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=2)
STATE = StateSpec(delta_planes(2, 4, 8, 8))
NBYTES = 1 << 30


@pytest.fixture
def runtime():
    made = FakeRuntime(num_devices=1)
    with use_runtime(made):
        yield made
        gc.collect()


def make(layers=SPEC, **options):
    return PagedKVCache(
        layers,
        **{"block_size": 4, "num_blocks": 9, "max_sequences": 4, "memory_saver": True, "device": "cuda:0"} | options,
    )


def content(tensor):
    return np.frombuffer(ctypes.string_at(tensor.pointer, tensor.nbytes), np.uint8)


def named(runtime, *names):
    return [call[0] for call in runtime.calls if call[0] in names]


def test_memory_leaves_and_comes_back_at_the_same_addresses_with_zeros(runtime):
    cache = make([SPEC, STATE], num_states=9)
    views = [cache.key(0), cache.value(0), cache.plane("temporal", 1)]
    pointers = [view.pointer for view in views]
    assert all(is_mapped for _, is_mapped in runtime.ranges.values())
    held = NBYTES - runtime.room
    for view in views:
        ctypes.memset(view.pointer, 7, view.nbytes)
    assert 0 < cache.release_memory() <= held
    assert runtime.room == NBYTES
    assert not any(is_mapped for _, is_mapped in runtime.ranges.values())
    assert all((content(view) == 0xEE).all() for view in views)
    cache.release_memory()
    cache.resume_memory()
    cache.resume_memory()
    assert runtime.room == NBYTES - held
    assert [cache.key(0).pointer, cache.value(0).pointer, cache.plane("temporal", 1).pointer] == pointers
    assert not any(content(view).any() for view in views)
    cache.check_invariants()


def test_steps_are_refused_meanwhile_and_run_afterwards(runtime):
    cache = make()
    sequence = cache.add_sequence(range(6))
    cache.release_memory()
    with pytest.raises(DeviceError, match=r"released; call resume_memory\(\)"):
        cache.prepare([sequence], 6)
    cache.resume_memory()
    cache.commit(cache.prepare([sequence], 6))
    assert sequence.num_computed_tokens == 6
    with pytest.raises(UnsupportedOption, match="hold 2 blocks"):
        cache.release_memory()
    assert all(is_mapped for _, is_mapped in runtime.ranges.values())
    cache.remove(sequence)
    assert cache.stats().num_cached_blocks == 1
    cache.release_memory()
    assert cache.stats().num_cached_blocks == 0
    cache.check_invariants()


@pytest.mark.parametrize("room", [0, 1 << 16])
def test_a_device_without_room_leaves_the_memory_released(runtime, room):
    cache = make([SPEC, STATE], num_states=9)
    assert len(runtime.ranges) > 1
    cache.release_memory()
    runtime.room = room
    for _ in range(2):
        with pytest.raises(NotEnoughMemory, match="full"):
            cache.resume_memory()
        assert runtime.room == room
        assert not any(is_mapped for _, is_mapped in runtime.ranges.values())
        with pytest.raises(DeviceError, match="released"):
            cache.prepare([cache.add_sequence(range(3))], 1)
    runtime.room = NBYTES
    cache.resume_memory()
    assert not content(cache.key(0)).any()


@pytest.mark.parametrize("is_released", [False, True])
def test_a_cache_that_is_gone_leaves_neither_memory_nor_addresses(runtime, is_released):
    cache = make()
    view = cache.key(0)
    if is_released:
        cache.release_memory()
    del cache
    gc.collect()
    assert runtime.ranges  # a view keeps its addresses
    del view
    gc.collect()
    assert runtime.ranges == {}
    assert runtime.room == NBYTES
    reserved, freed = (named(runtime, name) for name in ("reserve_address", "free_address"))
    assert len(reserved) == len(freed)


def test_a_cache_that_does_not_fit_leaves_nothing(runtime):
    runtime.room = 1 << 16
    with pytest.raises(NotEnoughMemory):
        make([SPEC, STATE], num_states=9)
    gc.collect()
    assert runtime.ranges == {}
    assert runtime.room == 1 << 16


def test_a_release_that_fails_half_way_is_completed_by_a_resume(runtime, monkeypatch):
    cache = make([SPEC, STATE], num_states=9)
    unmap, calls = runtime.unmap_memory, []

    def fail_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise DeviceError("the device failed")
        unmap(*arguments)

    monkeypatch.setattr(runtime, "unmap_memory", fail_the_second)
    with pytest.raises(DeviceError, match="the device failed"):
        cache.release_memory()
    with pytest.raises(DeviceError, match="released"):
        cache.prepare([cache.add_sequence(range(3))], 1)
    cache.resume_memory()
    assert all(is_mapped for _, is_mapped in runtime.ranges.values())
    cache.check_invariants()
