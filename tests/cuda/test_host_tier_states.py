"""States in the host tier of a cache on CUDA."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import PagedKVCache, StateSpec, dequantize_state, quantize_state
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.cuda.host_tiers import LAYERS, ended, make, tier_of


def test_states_come_back(cuda):
    layers = [StateSpec(delta_planes(2, 4, 8, 8), chunk=4, interval=8), LAYERS[0]]
    cache = make(cuda, layers, num_states=6)
    tier = tier_of(cache)
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 8)
    slot = int(cuda.get(batch.checkpoint_write)[0])
    planes = [cache.plane(plane.name, 0) for plane in layers[0].planes]
    for number, plane in enumerate(planes):
        cuda.runtime.fill(plane[slot].pointer, number + 1, plane[slot].nbytes, 0)
    cache.commit(batch)
    tier.backup(sequence)
    assert ended(tier)[0].state_tokens == 8
    cache.remove(sequence)
    cache.clear_prefix_cache()
    assert tier.promote(range(9)) == 8
    again = cache.add_sequence(range(9))
    cuda.runtime.synchronize(0)
    found = cache.state_slot(again)
    for number, plane in enumerate(planes):
        assert (cuda.get(plane[found]).view(np.uint8) == number + 1).all()
    tier.poll()
    tier.close()


def test_quantised_states_come_back(cuda):
    planes = delta_planes(2, 4, 8, 8)
    layers = [StateSpec(planes, chunk=4, interval=8, checkpoint_format="int8"), LAYERS[0]]
    cache = make(cuda, layers, num_states=6, num_checkpoints=5)
    tier = tier_of(cache)
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 8)
    state = np.random.default_rng(0).standard_normal(planes[1].shape).astype(np.float32)
    for slots in (batch.state_write, batch.checkpoint_write):
        slot = int(cuda.get(slots)[0])
        cuda.runtime.copy(cache.plane("temporal", 0)[slot].pointer, state.ctypes.data, state.nbytes, 0)
    cache.commit(batch)
    tier.backup(sequence)
    assert ended(tier)[0].state_tokens == 8
    cache.remove(sequence)
    cache.clear_prefix_cache()
    for name in ("temporal", "temporal_scale"):
        plane = cache.checkpoint_plane(name, 0)
        cuda.runtime.fill(plane.pointer, 0xFF, plane.nbytes, 0)
    assert tier.promote(range(9)) == 8
    again = cache.add_sequence(range(9))
    batch = cache.prepare([again], 1)
    found = cuda.get(cache.plane("temporal", 0)[int(cuda.get(batch.state_read)[0])])
    np.testing.assert_array_equal(found, dequantize_state(*quantize_state(state)))
    cache.abandon(batch)
    tier.poll()
    tier.close()


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("format", [None, "int8"])
def test_tiers_serve_more_states_than_a_cache_of_states_alone_holds(cuda, format, pipelined):
    planes = delta_planes(2, 4, 8, 8)
    layers = [StateSpec(planes, chunk=4, interval=8, checkpoint_format=format)] * 3
    slots = {"num_states": 7} if format is None else {"num_states": 4, "num_checkpoints": 4}
    cache = PagedKVCache(layers, block_size=4, max_sequences=2, device=cuda.device, **slots)
    host = HostTier(cache, num_states=20, huge_pages=False, pipelined=pipelined)
    assert host.pool.memory.wait_registered(60)
    tiers = Tiers(cache, host, write="on_evict", min_tokens=4)
    states = np.random.default_rng(0).standard_normal((8, 3, *planes[1].shape)).astype(np.float32)
    for turn in range(2):
        for prompt in range(8):
            sequence = cache.add_sequence(range(50 * prompt, 50 * prompt + 17 + turn))
            assert sequence.num_computed_tokens == 16 * turn
            batch = cache.prepare([sequence], 17 - 15 * turn)
            read, *written = (
                int(cuda.get(each)[0]) for each in (batch.state_read, batch.state_write, batch.checkpoint_write)
            )
            for layer in range(3):
                state, plane = states[prompt, layer], cache.plane("temporal", layer)
                if turn:
                    expected = state if format is None else dequantize_state(*quantize_state(state))
                    np.testing.assert_array_equal(cuda.get(plane[read]), expected)
                    continue
                for slot in written:
                    cuda.runtime.copy(plane[slot].pointer, state.ctypes.data, state.nbytes, 0)
            cache.commit(batch)
            cache.remove(sequence)
            assert tiers.drain()
            tiers.poll()
    assert tiers.stats().hit_tokens["CPU"] >= 16 * 4
    tiers.check_invariants()
    tiers.close()
