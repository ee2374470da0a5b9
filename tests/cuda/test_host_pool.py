"""HostPool on a device: blocks move between a pool of the device and registered host memory."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import AttentionSpec, KVPool, PagedKVCache, StatePool, StateSpec, empty, transfer_blocks
from pagecore.storage import HostPool
from pagecore.storage.state_shapes import delta_planes
from tests.cuda.caches import block_bytes, random_step, write_step

SPEC, LAYERS, SIZE = AttentionSpec(2, 8, 12, "float16"), 3, 4
STATES = [StateSpec(delta_planes(2, 4, 8, 8))] * 2


@pytest.fixture
def host(cuda):
    pool = HostPool([(SPEC, LAYERS)], SIZE, STATES, num_blocks=[6], num_states=4, device=cuda.device)
    assert pool.memory.wait_registered(60)
    yield pool
    cuda.runtime.synchronize(0)
    pool.close()


def random_bytes(tensor, seed):
    array = tensor.numpy()
    array[...] = np.random.default_rng(seed).integers(0, 256, array.shape, np.uint8)
    return array.copy()


@pytest.mark.parametrize("layout", ["layerwise", "blockwise", "BNHD"])
def test_blocks_go_to_the_device_and_back_bit_for_bit(cuda, host, layout):
    before = random_bytes(host.entries(0), 0)
    device = KVPool(SPEC, LAYERS, 8, SIZE, layout, cuda.device)
    transfer_blocks(host.kv_pools[0].planes(), device.planes(), [[1, 7], [2, 3], [5, 1]])
    transfer_blocks(device.planes(), host.kv_pools[0].planes(), [[7, 4], [1, 3]])
    cuda.runtime.synchronize(0)
    before[4], before[3] = before[1], before[5]
    np.testing.assert_array_equal(host.entries(0).numpy(), before)


def test_states_go_to_the_device_and_back(cuda, host):
    before = random_bytes(host.entries(1), 1)
    device = StatePool(STATES, 5, device=cuda.device)
    for one, other in zip(host.state_pool.planes(), device.planes(), strict=True):
        transfer_blocks([one], [other], [[1, 4], [3, 2]])
    host.state_pool.zero([3])
    for one, other in zip(device.planes(), host.state_pool.planes(), strict=True):
        transfer_blocks([one], [other], [[4, 2]])
    cuda.runtime.synchronize(0)
    before[2] = before[1]
    before[3] = 0
    np.testing.assert_array_equal(host.entries(1).numpy(), before)


def test_the_memory_is_page_locked_until_the_pool_is_closed(cuda, host):
    assert host.memory.is_registered(0, host.nbytes)
    if cuda.is_emulated:
        assert cuda.runtime.counts["registrations"] == 1
    cuda.runtime.synchronize(0)
    host.close()
    assert not host.memory.is_registered(0, 1)
    if cuda.is_emulated:
        assert cuda.runtime.counts["registrations"] == 0


def test_a_cache_takes_its_device_memory_from_an_allocator(cuda):
    given = []

    def allocator(nbytes, device):
        given.append(empty((nbytes,), "uint8", device))
        runtime.fill(given[-1].pointer, 0xAB, nbytes, 0)
        return given[-1]

    runtime, outputs = cuda.runtime, []
    layers = [AttentionSpec(2, 8, dtype="float32", num_query_heads=4)] * 2
    for source in (None, allocator):
        cache = PagedKVCache(layers, block_size=4, num_blocks=9, max_sequences=4, device=cuda.device, allocator=source)
        sequence = cache.add_sequence(range(13))
        write_step(cache, [sequence], [13], random_step(cuda, cache, 13))
        runtime.synchronize(0)
        outputs.append(block_bytes(cuda, cache, sequence))
        assert not cuda.get(cache.key(1))[0].any()
    assert outputs[0] == outputs[1]
    assert [region.address for region in cache.regions()] == [tensor.pointer for tensor in given]
    assert {region.device for region in cache.regions()} == {cuda.device}
