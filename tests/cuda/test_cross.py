"""Cross attention on CUDA: the state machine of the host, a captured graph's fixed addresses, and removed sequences."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import PagedKVCache
from tests.cache.caches import normal
from tests.cache.cross_caches import LAYERS, attention
from tests.cache.test_cross_machine import CrossMachine
from tests.cuda.caches import DeviceCache, run_machine
from tests.cuda.matrix import cases


def make(cuda, **options):
    return DeviceCache(cuda, LAYERS, **{"block_size": 4, "num_blocks": [17, 9], "max_sequences": 4} | options)


@pytest.mark.slow
def test_a_cache_on_a_device_behaves_as_its_model(cuda):
    class HostPlanes(CrossMachine):
        def plane(self, name, blocks):
            return cuda.get(self.cache.plane(name, 0))[blocks].reshape(-1, 1, 8)

    run_machine(HostPlanes, cuda, *cases((20, 25), (200, 50)))


def test_a_step_reads_the_rows_of_its_own_prepare_at_fixed_addresses(cuda):
    cache = make(cuda)
    sequences = [cache.add_sequence(range(3), cross_tokens=length) for length in (5, 9)]
    keys, values = normal(14, 2, 8, seed=1), normal(14, 2, 8, seed=2)
    batch = cache.make_batch(2, 6, 14)
    addresses = [each.pointer for each in (batch.cross.rows, batch.cross.seq_lens, batch.group(1).slot_mapping)]
    cache.prepare(sequences, 3, batch)
    cache.write(1, keys, values, batch)
    query = normal(6, 4, 8, seed=3)
    stored = [(keys[:5], values[:5]), (keys[5:], values[5:])]
    for order in ([0, 1], [1, 0], [1]):
        if batch.in_flight:
            cache.commit(batch)
            cache.append_tokens(sequences, [[1, 2, 3]] * 2)
            cache.prepare([sequences[i] for i in order], 3, batch)
        found = cache.attend(1, query, batch)
        for place, i in enumerate(order):
            rows = slice(3 * place, 3 * place + 3)
            np.testing.assert_allclose(found[rows], attention(query[rows], *stored[i]), rtol=0, atol=1e-5)
        assert not found[3 * len(order) :].any()
    assert addresses == [each.pointer for each in (batch.cross.rows, batch.cross.seq_lens, batch.group(1).slot_mapping)]
    cache.check_invariants()


def test_the_last_sequence_of_an_output_in_flight_leaves_padding(cuda):
    cache = make(cuda)
    first, second = (cache.add_sequence(range(3), cross_tokens=5) for _ in range(2))
    batch = cache.prepare([first, second], 3)
    cache.remove(first)
    slots = cuda.get(batch.group(1).slot_mapping).tolist()
    assert slots[:5] == [-1] * 5
    assert -1 not in slots[5:]
    cache.abandon(batch)
    assert cuda.get(batch.group(1).slot_mapping).tolist() == [-1] * 10
    cache.check_invariants()


def test_scrubbed_caches_zero_encoder_blocks_on_the_device(cuda):
    cache = make(cuda, scrub=True)
    first = cache.add_sequence(range(3), cross_tokens=32, namespace="a")
    batch = cache.prepare([first], 3)
    cache.write(1, normal(32, 2, 8), normal(32, 2, 8), batch)
    cache.commit(batch)
    cache.remove(first)
    assert isinstance(cache, PagedKVCache)
    assert cuda.get(cache.key(1)).any()
    cache.prepare([cache.add_sequence(range(3), cross_tokens=32, namespace="b")], 3)
    assert not cuda.get(cache.key(1))[1:].any()
