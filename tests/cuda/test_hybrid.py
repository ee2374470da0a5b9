"""PagedKVCache with layers that keep states, on CUDA: slots, zeros and copies of a step."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    CrossSpec,
    PagedKVCache,
    Plane,
    StateSpec,
    SwapSpace,
    dequantize_state,
    quantize_state,
)
from pagecore.errors import DeviceError
from tests.cache.caches import normal
from tests.cache.test_hybrid_machine import HybridMachine
from tests.cuda.caches import DeviceCache, assert_device_batch, run_machine
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases

LAYERS = [
    AttentionSpec(2, 8, dtype="float32", num_query_heads=4),
    StateSpec((Plane("temporal", (4,), "float32", per="sequence"),), chunk=4, interval=8),
]


def fill(cuda: Kit, plane, values) -> None:
    """Overwrite a plane, one block or slot at a time."""
    for entry, given in enumerate(np.ascontiguousarray(values)):
        cuda.runtime.copy(plane[entry].pointer, given.ctypes.data, given.nbytes, 0)
    cuda.runtime.synchronize(0)


def make(cuda: Kit, **options) -> PagedKVCache:
    return PagedKVCache(
        LAYERS, block_size=4, num_blocks=17, num_states=9, max_sequences=4, device=cuda.device, **options
    )


@pytest.mark.slow
def test_a_cache_with_states_on_a_device_behaves_as_its_model(cuda: Kit):
    run_machine(HybridMachine, cuda, *cases((35, 25), (250, 40)))


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


def test_a_cache_of_states_alone_sends_the_lengths_of_its_rows(cuda: Kit):
    cache = PagedKVCache([LAYERS[1]], num_states=9, block_size=4, max_sequences=4, device=cuda.device)
    first = cache.add_sequence(range(9))
    batch = cache.prepare([first], 5)
    assert_device_batch(cuda, batch)
    assert cuda.get(cache.row_lengths).tolist() == [5, 0, 0, 0, 0]
    cache.commit(batch)


@pytest.mark.parametrize("ends", ["abandon", "remove"])
def test_slots_of_a_step_in_a_cache_of_states_alone_become_the_null_slot(cuda: Kit, ends: str):
    cache = PagedKVCache([LAYERS[1]], num_states=9, block_size=4, max_sequences=4, device=cuda.device)
    first, second = cache.add_sequence(range(9)), cache.add_sequence(range(20, 30))
    batch = cache.prepare([first, second], [9, 10])
    if ends == "abandon":
        cache.abandon(batch)
    else:
        cache.remove(first)
    assert_device_batch(cuda, batch)
    assert cuda.get(batch.state_write)[0] == cuda.get(batch.checkpoint_write)[0] == 0
    assert (cuda.get(batch.state_write)[1] == 0) == (ends == "abandon")


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


def quantised(cuda: Kit, **options) -> PagedKVCache:
    planes = (Plane("conv", (3,), "float32", per="sequence"), Plane("temporal", (2, 4, 3), "float32", per="sequence"))
    spec = StateSpec(planes, chunk=4, interval=8, checkpoint_format="int8")
    return PagedKVCache([spec], num_states=9, num_checkpoints=9, block_size=4, device=cuda.device, **options)


def run_pass(cuda: Kit, cache: PagedKVCache, batch, state, stream: int) -> None:
    """Write a state to the slots of the only sequence of a step: its own, and that of its checkpoint."""
    for slots in (batch.host.states.state_write, batch.host.states.checkpoint_write):
        if slot := int(slots.numpy()[0]):
            cuda.runtime.copy(cache.plane("temporal", 0)[slot].pointer, state.ctypes.data, state.nbytes, stream)


@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_is_quantised_after_its_pass_on_any_stream(cuda: Kit, late: bool):
    """With `late` the pass of the first step is submitted after another step was prepared on another stream."""
    cache, streams = quantised(cuda, max_sequences=4), [cuda.stream(), cuda.stream()]
    rng = np.random.default_rng(0)
    states = [rng.standard_normal((2, 4, 3)).astype(np.float32) for _ in range(2)]
    first, second = cache.add_sequence(range(9)), cache.add_sequence(range(20, 30))
    cuda.runtime.synchronize(0)
    if cuda.is_emulated:
        cuda.runtime.streams.deferred = True
    batches = [cache.prepare([first], 8, stream=streams[0])]
    if not late:
        run_pass(cuda, cache, batches[0], states[0], streams[0])
    batches.append(cache.prepare([second], 8, stream=streams[1]))
    if late:
        run_pass(cuda, cache, batches[0], states[0], streams[0])
    run_pass(cuda, cache, batches[1], states[1], streams[1])
    for batch in batches:
        cache.commit(batch)
    again = cache.add_sequence([*range(8), 50])
    assert again.num_computed_tokens == 8
    batch = cache.prepare([again], 1, stream=streams[1])
    cuda.runtime.synchronize(streams[1])
    for sequence, state in zip((first, second), states, strict=True):
        slot, length = cache.checkpoint(sequence)
        codes, scales = quantize_state(state)
        assert length == 8
        np.testing.assert_array_equal(cuda.get(cache.checkpoint_plane("temporal", 0)[slot]), codes)
        np.testing.assert_array_equal(cuda.get(cache.checkpoint_plane("temporal_scale", 0)[slot]), scales)
    read = cuda.get(cache.plane("temporal", 0)[int(cuda.get(batch.state_read)[0])])
    np.testing.assert_array_equal(read, dequantize_state(*quantize_state(states[0])))


def test_a_commit_that_quantises_is_refused_in_a_capture(cuda: Kit, monkeypatch):
    cache = quantised(cuda, max_sequences=4)
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 8)
    with monkeypatch.context() as patch:
        patch.setattr(cuda.runtime, "is_capturing", lambda stream: True)
        with pytest.raises(DeviceError, match="is being captured"):
            cache.commit(batch)
    assert sequence.num_computed_tokens == 0
    cache.commit(batch)
    assert cache.checkpoint(sequence)[1] == 8
    cache.check_invariants()


@pytest.mark.parametrize("ends", ["abandon", "remove"])
def test_steps_with_encoder_tokens_and_states_leave_padding(cuda: Kit, ends: str):
    layers = [CrossSpec(2, 8, dtype="float32", num_query_heads=4), *LAYERS]
    cache = DeviceCache(cuda, layers, block_size=4, num_blocks=[17, 9], num_states=9, max_sequences=4)
    first, second = (cache.add_sequence(range(9), cross_tokens=5) for _ in range(2))
    batch = cache.prepare([first, second], 9)
    assert cuda.get(batch.state_write)[:2].all()
    if ends == "abandon":
        cache.abandon(batch)
    else:
        cache.remove(first)
    gone = slice(0, 2) if ends == "abandon" else slice(0, 1)
    assert not cuda.get(batch.state_write)[gone].any()
    own, written = (cuda.get(batch.group(layer).slot_mapping) for layer in (1, 0))
    assert (own[: 9 * gone.stop] == -1).all()
    assert (own[9 * gone.stop : 18] >= 0).all()
    assert (written[: 5 * gone.stop] == -1).all()
    assert (written[5 * gone.stop : 10] >= 0).all()
    cache.check_invariants()


def test_swaps_on_a_device_move_states_and_encoder_outputs(cuda: Kit):
    layers = [CrossSpec(2, 8, dtype="float32", num_query_heads=4), *LAYERS]
    cache = DeviceCache(cuda, layers, block_size=4, num_blocks=[17, 9], num_states=9, max_sequences=4)
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(9), cross_tokens=5)
    keys, values = normal(5, 2, 8, seed=1), normal(5, 2, 8, seed=2)
    batch = cache.prepare([sequence], 9)
    cache.write(0, keys, values, batch)
    states = np.arange(36, dtype=np.float32).reshape(9, 4)
    fill(cuda, cache.plane("temporal", 2), states)
    slot = cuda.get(batch.state_write)[0]
    cache.commit(batch)
    cache.swap_out([sequence], space)
    for plane in (cache.plane("temporal", 2), cache.key(0)):
        fill(cuda, plane, np.full(plane.shape, np.nan, np.float32))
    cache.swap_in([sequence])
    cache.append_tokens(sequence, [1])
    batch = cache.prepare([sequence], 1)
    read = cuda.get(cache.plane("temporal", 2))[cuda.get(batch.state_read)[0]]
    np.testing.assert_array_equal(read, states[slot])
    stored = cuda.get(cache.key(0)).reshape(-1, 2, 8)
    row = cuda.get(cache.block_table(1))[sequence.cross_row][:2]
    slots = (row[:, None] * 4 + np.arange(4)).ravel()[:5]
    np.testing.assert_array_equal(stored[slots], keys)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_tree_of_drafts_reads_the_states_of_its_parents(cuda: Kit, in_place):
    spec = StateSpec(LAYERS[1].planes, chunk=4, interval=8, draft_tokens=5, in_place=in_place)
    cache = PagedKVCache([LAYERS[0], spec], block_size=4, num_blocks=17, num_states=30, device=cuda.device)
    batch = cache.make_batch(2, 32, max_tree_tokens=6)
    first, second = cache.add_sequence(range(9)), cache.add_sequence(range(20, 26))
    cache.commit(cache.prepare([first, second], [9, 6], batch))
    cache.append_tokens([first, second], [[31, 32, 33, 34, 35], [41, 42, 43]])
    cache.prepare([first, second], [5, 3], batch, parents=[[-1, 0, 0, 2, 1], None])
    assert_device_batch(cuda, batch)
    reads, writes = cuda.get(batch.draft_read), cuda.get(batch.draft_write)
    before = cuda.get(batch.state_read)
    assert reads[0].tolist() == [before[0], *writes[0][[0, 0, 2, 1]], 0]
    assert reads[1].tolist() == [before[1], *writes[1][:2], 0, 0, 0]
    cache.commit(batch, accepted_path=[[0, 2, 3], None])
    assert [cache.state_slot(first), cache.state_slot(second)] == [writes[0][3], writes[1][2]]
    assert first.tokens.tolist()[9:] == [31, 33, 34]
    cache.append_tokens([first], [[7, 8]])
    cache.prepare([first], 2, batch, parents=[[-1, 0]])
    cache.remove(first)  # its slots become padding on the device
    assert not cuda.get(batch.draft_read).any()
    assert not cuda.get(batch.draft_write).any()
    cache.check_invariants()
