"""Pools on CUDA: allocated and adopted memory, budgets from free memory, and views."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import AttentionSpec, KVLayout, KVPool, NotEnoughMemory, PagedCacheConfig, PagedKVCache, Plane, make_cache
from pagecore.errors import DeviceError, ShapeError
from pagecore.serving.planner import plan_memory
from pagecore.storage import free_memory, parse_memory
from tests.cuda.kit import Kit

SPEC = AttentionSpec(2, 8, 16, "bfloat16")


@pytest.mark.parametrize("layout", ["layerwise", "blockwise", KVLayout("layerwise", "NHD"), "BNCHD", "LBNHD", "NBHD"])
def test_planes_of_a_pool_are_views_of_device_memory_whose_null_block_is_zero(cuda: Kit, layout):
    spec = AttentionSpec(2, 8, dtype="bfloat16") if layout == "BNCHD" else SPEC
    pool = KVPool(spec, num_layers=3, num_blocks=5, block_size=4, layout=layout, device="cuda")
    host = KVPool(spec, num_layers=3, num_blocks=5, block_size=4, layout=layout)
    assert pool.device == "cuda:0"
    for plane, other in zip(pool.planes(), host.planes(), strict=True):
        assert (plane.device, plane.shape, plane.strides) == ("cuda:0", other.shape, other.strides)
        assert not cuda.get(plane)[0].view(np.uint16).any()
    starts = [plane.pointer - pool.buffers[0].pointer for plane in pool.planes()]
    if len(pool.buffers) == 1:
        assert starts == [plane.pointer - host.buffers[0].pointer for plane in host.planes()]
    assert (pool.nbytes, pool.bytes_per_block) == (host.nbytes, host.bytes_per_block)


def test_adopted_memory_is_used_in_place_and_not_changed(cuda: Kit):
    memory = cuda.put(np.full(10_000, 7, np.uint8))
    pool = KVPool(SPEC, 1, 5, 4, device=cuda.device, buffers=memory)
    assert pool.key().pointer == memory.pointer
    assert (cuda.get(memory) == 7).all()


def test_adopted_buffers_may_be_given_by_the_name_of_their_plane(cuda: Kit):
    key, value = cuda.empty((3, 4, 2, 8), "bfloat16"), cuda.empty((3, 4, 2, 16), "bfloat16")
    pool = KVPool(SPEC, 1, 3, 4, layout="LBNHD", device="cuda", buffers={"value": value, "key": key})
    assert (pool.key().pointer, pool.value().pointer) == (key.pointer, value.pointer)


def test_memory_of_another_device_is_not_adopted(cuda: Kit):
    on_host, on_device = np.zeros(10_000, np.uint8), cuda.empty(10_000, "uint8")
    with pytest.raises(DeviceError, match="cpu; the pool is on cuda:0"):
        KVPool(SPEC, 1, 5, 4, device="cuda", buffers=on_host)
    with pytest.raises(DeviceError, match="cuda:0; the pool is on cpu"):
        KVPool(SPEC, 1, 5, 4, buffers=on_device)
    with pytest.raises(ShapeError, match="needed"):
        KVPool(SPEC, 1, 5, 4, device="cuda", buffers=on_device[:100])


def test_planes_that_are_per_block_have_no_token_axis(cuda: Kit):
    class Scaled:
        window = None
        planes = (Plane("key", (2, 8), "float16"), Plane("scale", (2,), "float32", per="block"))

    pool = KVPool(Scaled(), num_layers=2, num_blocks=3, block_size=4, layout="LBNHD", device="cuda")
    assert pool.plane("scale", 1).shape == (3, 2)
    assert not cuda.get(pool.plane("scale", 1))[0].any()


@pytest.mark.parametrize("device", ["cuda:99", "cuda:-1", "cuda0", "gpu", "CUDA", ""])
def test_an_absent_device_is_refused_by_name(cuda: Kit, device):
    calls = [
        lambda: KVPool(SPEC, 1, 5, 4, device=device),
        lambda: PagedKVCache(SPEC, num_blocks=5, device=device),
        lambda: KVPool.blocks_for(0.5, SPEC, 1, device=device),
        lambda: free_memory(device),
        lambda: plan_memory(SPEC, 0.5, device=device),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match=f"device is {device!r}"):
            call()


def test_a_memory_fraction_applies_to_the_free_memory_of_the_device(cuda: Kit):
    free, _ = cuda.runtime.memory_info(0)
    if not cuda.is_emulated:
        assert 0 < free_memory("cuda") <= free
        return
    assert free_memory("cuda:0") == free
    assert parse_memory(0.25, "cuda") == free // 4
    one = KVPool(SPEC, 1, 2, 16).bytes_per_block
    assert KVPool.blocks_for(0.5, SPEC, 1, 16, "cuda") == free // 2 // one
    assert plan_memory(SPEC, 0.5, device="cuda").num_blocks == free // 2 // one


def test_the_number_of_blocks_defaults_to_the_free_memory_of_the_device(cuda: Kit, monkeypatch):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: its amount of memory can be set")
    one = KVPool(SPEC, 2, 2, 16).bytes_per_block
    cuda.runtime.total_bytes = 40 * one + 1
    for config in (
        PagedCacheConfig(device="cuda", max_tokens_per_sequence=64),
        PagedCacheConfig(memory=0.5, device="cuda"),
    ):
        cache = make_cache(config, SPEC, num_layers=2)
        assert (cache.num_blocks, cache.device, cache.nbytes) == ((20,), "cuda:0", 20 * one)
        assert cache.key(1).device == "cuda:0"
        del cache
    with pytest.raises(NotEnoughMemory):
        make_cache(PagedCacheConfig(memory=0.01, device="cuda"), SPEC, num_layers=2)


def test_configs_name_the_whole_device(cuda: Kit):
    assert PagedCacheConfig(device="cuda") == PagedCacheConfig(device="cuda:0")
    assert PagedCacheConfig(device="cuda").device == "cuda:0"
