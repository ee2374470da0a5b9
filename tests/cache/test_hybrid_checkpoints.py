"""Quantised checkpoints in a cache: bytes, reuse, rows at rest, shortage, swaps, sizes and refusals."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec, SwapSpace, quantize_state
from pagecore.errors import NotEnoughMemory, OutOfBlocks, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage import state_budget
from pagecore.tiers.host.tier import HostTier

FULL = AttentionSpec(1, 8, dtype="float32")
PLANES = (Plane("conv", (3,), "float32", per="sequence"), Plane("temporal", (2, 4, 3), "float32", per="sequence"))
RULES = {"chunk": 4, "interval": 8, "checkpoint_format": "int8"}


def make(num_states=6, num_checkpoints=9, rules=RULES, **options):
    given = {"block_size": 4, "num_blocks": 60, "max_sequences": 4} | options
    spec = StateSpec(PLANES, **rules)
    return PagedKVCache([spec, FULL, spec], num_states=num_states, num_checkpoints=num_checkpoints, **given)


def after(ids, layer, plane):
    """Return the state of a layer after some tokens."""
    rng = np.random.default_rng([len(ids), layer, len(plane.name), *ids])
    return rng.standard_normal(plane.shape).astype(np.float32)


def restored(state):
    codes, scales = quantize_state(state)
    return codes.astype(np.float32) * scales[..., None, :]


def is_state(found, expected):
    """Return "exact", "restored" or None."""
    if np.array_equal(found, expected):
        return "exact"
    return "restored" if found.ndim > 1 and np.array_equal(found, restored(expected)) else None


def step(cache, sequence, count):
    """Compute a step; return how it found the recurrent state of layer 0: "exact", "restored" or "zero"."""
    batch, before = cache.prepare([sequence], count), sequence.num_computed_tokens
    ids, found = sequence.tokens.tolist(), "zero"
    for layer in (0, 2):
        for plane in PLANES:
            array = cache.plane(plane.name, layer).numpy()
            state = array[batch.state_read.numpy()[0]]
            if before == 0:
                assert not state.any()
            else:
                kind = is_state(state, after(ids[:before], layer, plane))
                assert kind is not None
                found = kind if plane.name == "temporal" else found
            kept = int(batch.checkpoint_lengths.numpy()[0])
            if kept:
                array[batch.checkpoint_write.numpy()[0]] = after(ids[:kept], layer, plane)
            array[batch.state_write.numpy()[0]] = after(ids[: before + count], layer, plane)
            array[0] = 0
    cache.commit(batch)
    cache.check_invariants()
    return found


def check_checkpoint(cache, slot, ids):
    """Assert that a checkpoint has exactly the bytes of the plain quantiser."""
    for layer in (0, 2):
        conv, temporal = (after(ids, layer, plane) for plane in PLANES)
        codes, scales = quantize_state(temporal)
        np.testing.assert_array_equal(cache.checkpoint_plane("conv", layer).numpy()[slot], conv)
        np.testing.assert_array_equal(cache.checkpoint_plane("temporal", layer).numpy()[slot], codes)
        np.testing.assert_array_equal(cache.checkpoint_plane("temporal_scale", layer).numpy()[slot], scales)


@pytest.mark.parametrize("rules", [RULES, RULES | {"in_place": False}, RULES | {"draft_tokens": 2}])
def test_a_prefix_is_reused_from_a_quantised_checkpoint(rules):
    cache = make(rules=rules, num_states=9)
    first = cache.add_sequence(range(30))
    assert step(cache, first, 14) == "zero"
    slot, length = cache.checkpoint(first)
    assert length == 12
    check_checkpoint(cache, slot, list(range(12)))
    assert step(cache, first, 1) == "exact"
    assert step(cache, first, 1) == "exact"  # the running state keeps its precision
    assert cache.checkpoint(first)[1] == 16
    second = cache.add_sequence([*range(15), 7, 7])
    assert second.num_computed_tokens == 12
    assert cache.state_slot(second) == 0
    assert step(cache, second, 5) == "restored"
    stats = cache.stats()
    assert stats.num_states == 8
    assert stats.num_checkpoints == 8
    assert stats.num_cached_states == stats.num_checkpoints - stats.num_free_checkpoints == 3
    assert cache.num_checkpoints == 9
    assert cache.nbytes == cache.num_blocks[0] * 4 * 64 + 9 * 2 * (12 + 96) + 9 * 2 * (12 + 24 + 24)


def test_a_fork_a_cut_and_an_abandoned_step_begin_with_the_checkpoint():
    cache = make()
    first = cache.add_sequence(range(30))
    step(cache, first, 14)
    child = cache.fork(first)
    cache.truncate(child, 12)
    assert (cache.state_slot(child), child.num_computed_tokens) == (0, 12)
    batch = cache.prepare([child], 3)
    assert batch.state_loads.tolist() == [[cache.checkpoint(child)[0], batch.state_write.numpy()[0]]]
    cache.abandon(batch)
    assert child.num_computed_tokens == 12
    assert step(cache, child, 3) == "restored"
    assert step(cache, first, 1) == "exact"
    batch = cache.prepare([first], 1)
    cache.abandon(batch)
    assert first.num_computed_tokens == 12
    assert step(cache, first, 1) == "restored"


def test_a_running_state_is_not_copied_after_its_checkpoint():
    cache = make()
    first = cache.add_sequence(range(30))
    step(cache, first, 16)
    batch = cache.prepare([first], 1)
    assert batch.state_copies.tolist() == []
    cache.abandon(batch)


def test_short_checkpoints_evict_cached_states_and_then_are_left_out():
    cache = make(num_checkpoints=3)
    for prompt in range(3):
        sequence = cache.add_sequence([prompt] * 20)
        step(cache, sequence, 16)
        cache.remove(sequence)
    assert cache.stats().num_evicted_states == 1
    held = [cache.add_sequence([n] * 20) for n in (7, 8)]
    for sequence in held:
        step(cache, sequence, 16)
    batch = cache.prepare(held, [1, 1])
    third = cache.add_sequence([9] * 20)
    step(cache, third, 16)  # both checkpoints belong to sequences in flight
    assert cache.checkpoint(third) is None
    cache.abandon(batch)
    assert [sequence.num_computed_tokens for sequence in held] == [16, 16]


def test_running_slots_are_not_made_free_by_eviction():
    cache = make(num_states=3)
    sequences = [cache.add_sequence([n] * 20) for n in range(3)]
    step(cache, sequences[0], 3)
    step(cache, sequences[1], 16)  # without a slot to fill a checkpoint inside
    assert cache.shortage([sequences[2]], 3) == 1
    with pytest.raises(OutOfBlocks, match="1 state slots are needed and 0 are available"):
        cache.prepare([sequences[2]], 3)
    cache.remove(sequences[0])
    step(cache, sequences[2], 3)


@pytest.mark.parametrize("host", [False, True])
def test_swaps_move_states_and_checkpoints_as_they_are(host):
    cache = make()
    tier = HostTier(cache, num_blocks=20, num_states=9) if host else None
    space = SwapSpace(cache, host=tier) if host else SwapSpace(cache, num_blocks=20)
    running, resting = cache.add_sequence(range(30)), None
    step(cache, running, 14)
    resting = cache.add_sequence([*range(15), 3])
    slot, _ = cache.checkpoint(running)
    before = cache.checkpoint_plane("temporal", 2).numpy()[slot].copy()
    cache.swap_out([running, resting], space)
    space.check_invariants()
    cache.check_invariants()
    cache.clear_prefix_cache()
    assert cache.stats().num_free_checkpoints == cache.num_checkpoints - 1
    cache.plane("temporal", 0).numpy()[:] = np.nan
    cache.checkpoint_plane("temporal_scale", 0).numpy()[:] = np.nan
    cache.plane("temporal", 0).numpy()[0] = 0
    cache.swap_in([running, resting])
    cache.check_invariants()
    np.testing.assert_array_equal(cache.checkpoint_plane("temporal", 2).numpy()[cache.checkpoint(running)[0]], before)
    check_checkpoint(cache, cache.checkpoint(resting)[0], list(range(12)))
    assert step(cache, running, 1) == "exact"
    assert step(cache, resting, 4) == "restored"
    cache.remove(running)
    cache.remove(resting)
    if tier is not None:
        tier.close()


def test_a_host_tier_keeps_quantised_checkpoints():
    cache = make()
    with HostTier(cache, num_blocks=20, num_states=9) as tier:
        assert tier.payload_bytes[-1] == 2 * (12 + 24 + 24)
        first = cache.add_sequence(range(30))
        step(cache, first, 14)
        tier.backup(first)
        tier.drain()
        cache.remove(first)
        cache.clear_prefix_cache()
        assert tier.promote(range(30)) == 12
        second = cache.add_sequence(range(30))
        check_checkpoint(cache, cache.checkpoint(second)[0], list(range(12)))
        assert step(cache, second, 3) == "restored"
        cache.remove(second)
        tier.check_invariants()


def test_a_failed_conversion_leaves_the_step_in_flight(monkeypatch):
    cache = make()
    first = cache.add_sequence(range(30))
    batch = cache.prepare([first], 14)
    with monkeypatch.context() as patch:
        patch.setattr(cache._parts.store.quantiser, "save", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.commit(batch)
    assert (batch.in_flight, cache.checkpoint(first)) == (True, None)
    cache.commit(batch)
    assert cache.checkpoint(first)[1] == 12
    cache.check_invariants()


def test_the_owner_of_the_bytes_converts_them():
    cache = make(device="none")
    first = cache.add_sequence(range(30))
    batch = cache.prepare([first], 14)
    planned = int(batch.checkpoint_write.numpy()[0])
    cache.commit(batch)
    assert batch.state_saves.tolist() == [[planned, cache.checkpoint(first)[0]]]
    second = cache.add_sequence(range(30))
    batch = cache.prepare([second], 1)
    assert batch.state_loads.tolist() == [[cache.checkpoint(second)[0], batch.state_read.numpy()[0]]]


def test_a_memory_is_divided_among_blocks_states_and_checkpoints():
    spec = StateSpec(PLANES, **RULES)
    cache = PagedKVCache([FULL, spec, spec], memory="1MiB", state_ratio=0.9, max_sequences=4, block_size=4)
    share = state_budget("1MiB", 0.9)
    assert cache.num_states == 1 + 2 * 4
    assert cache.num_checkpoints == (share - cache.num_states * 216) // 120
    assert 2**20 - 600 < cache.nbytes <= 2**20
    many = PagedKVCache([FULL, spec, spec], memory="1MiB", state_ratio=0.9, max_sequences=4000, block_size=4)
    assert many.num_states == share // 336
    assert many.num_states <= many.num_checkpoints <= many.num_states + 2
    assert make(None, None).num_checkpoints == 1 + 2 * 4
    assert make(7, None).num_checkpoints == 7
    with pytest.raises(NotEnoughMemory):
        PagedKVCache([FULL, spec], memory=300, block_size=4)


def test_what_cannot_be_quantised_is_refused():
    half = Plane("temporal", (2, 2), "float16", per="sequence")
    with pytest.raises(UnsupportedOption, match="checkpoint_format is 'int4'; use 'int8'"):
        StateSpec(PLANES, checkpoint_format="int4")
    with pytest.raises(UnsupportedDtype, match="plane 'temporal' is float16"):
        StateSpec((half,), checkpoint_format="int8")
    with pytest.raises(ShapeError, match="it needs two axes"):
        StateSpec((Plane("temporal", (4,), "float32", per="sequence"),), checkpoint_format="int8")
    conv = StateSpec(PLANES[:1], checkpoint_format="int8")
    with pytest.raises(UnsupportedOption, match="no state layer has a plane 'temporal'"):
        PagedKVCache([conv, FULL], num_blocks=4)
    exact = StateSpec(PLANES)
    with pytest.raises(UnsupportedOption, match="checkpoints have slots of states"):
        PagedKVCache([exact, FULL], num_blocks=4, num_checkpoints=4)
    with pytest.raises(UnsupportedOption, match="have checkpoint_format None and int8"):
        PagedKVCache([exact, StateSpec(PLANES, checkpoint_format="int8"), FULL], num_blocks=4)
    with pytest.raises(UnsupportedOption, match="num_checkpoints is given"):
        SwapSpace(PagedKVCache([exact, FULL], num_blocks=4), num_blocks=4, num_checkpoints=4)
