"""PagedKVCache with layers that keep states, on CUDA: slots, zeros and copies of a step."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec
from tests.cache.test_hybrid_machine import HybridMachine
from tests.cuda.caches import assert_device_batch, run_machine
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases

LAYERS = [
    AttentionSpec(2, 8, dtype="float32", num_query_heads=4),
    StateSpec((Plane("temporal", (4,), "float32", per="sequence"),), chunk=4, interval=8),
]


def make(cuda: Kit, **options) -> PagedKVCache:
    return PagedKVCache(
        LAYERS, block_size=4, num_blocks=17, num_states=9, max_sequences=4, device=cuda.device, **options
    )


def test_a_cache_with_states_on_a_device_behaves_as_its_model(cuda: Kit):
    run_machine(HybridMachine, cuda, *cases((25, 25), (200, 40)))


def test_slots_stay_at_fixed_addresses_and_follow_each_step(cuda: Kit):
    cache = make(cuda)
    first, second = cache.add_sequence(range(9)), cache.add_sequence(range(20, 30))
    batch = cache.make_batch(3, 16)
    addresses = [batch.state_read.pointer, batch.state_write.pointer, batch.checkpoint_write.pointer]
    for counts in ([9, 6], [1, 3], [0, 1]):
        cache.prepare([first, second], counts, batch)
        assert_device_batch(cuda, batch)
        assert [batch.state_read.pointer, batch.state_write.pointer, batch.checkpoint_write.pointer] == addresses
        cache.commit(batch)


@pytest.mark.parametrize("ends", ["abandon", "remove"])
def test_slots_of_a_step_without_owner_become_the_null_slot(cuda: Kit, ends: str):
    cache = make(cuda)
    first, second = cache.add_sequence(range(9)), cache.add_sequence(range(20, 30))
    batch = cache.prepare([first, second], [9, 10])
    if ends == "abandon":
        cache.abandon(batch)
    else:
        cache.remove(first)
        cache.write(0, *(cuda.put(np.zeros((19, 2, 8), np.float32)) for _ in range(2)), batch)  # sends the host's slots
    assert_device_batch(cuda, batch)
    assert cuda.get(batch.state_write)[0] == cuda.get(batch.checkpoint_write)[0] == 0
    assert (cuda.get(batch.state_write)[1] == 0) == (ends == "abandon")


def test_a_shared_state_is_copied_on_the_stream_of_the_step(cuda: Kit):
    cache, stream = make(cuda), cuda.stream()
    sequence = cache.add_sequence(range(10))
    cache.commit(cache.prepare([sequence], 5, stream=stream))
    slot = cache._parts.state.states.slot(sequence.row)
    values = np.arange(4, dtype=np.float32)
    cuda.runtime.synchronize(stream)
    cuda.runtime.copy(cache.plane("temporal", 1)[slot].pointer, values.ctypes.data, values.nbytes, stream)
    child = cache.fork(sequence)
    batch = cache.prepare([child], 1, stream=stream)
    cuda.runtime.synchronize(stream)
    copy = int(cuda.get(batch.state_write)[0])
    assert copy != slot
    np.testing.assert_array_equal(cuda.get(cache.plane("temporal", 1)[copy]), values)
