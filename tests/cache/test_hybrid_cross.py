"""PagedKVCache with attention, states and cross attention at once."""

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    CrossSpec,
    OutOfBlocks,
    PagedKVCache,
    Plane,
    StateSpec,
    StaticKVCache,
    SwapSpace,
    UnsupportedOption,
)
from pagecore.serving.planner import plan_memory
from tests.cache.caches import normal
from tests.cache.cross_caches import attention, encode, expect_seen

STATE = StateSpec((Plane("temporal", (4,), "float32", per="sequence"),), chunk=4, interval=8)
OWN = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
CROSS = CrossSpec(2, 8, dtype="float32", num_query_heads=4, max_tokens=12)
# The states are between the groups, and cross attention precedes a group that moves before it.
LAYERS = [CROSS, STATE, OWN, STATE]
LAYER = 0


def make(**options):
    given = {"block_size": 4, "num_blocks": [17, 9], "num_states": 9, "max_sequences": 4, "device": "cpu"} | options
    return PagedKVCache(LAYERS, **given)


def run(cache, sequences, counts, keys=None, values=None):
    """Compute a step whose state after n tokens is n."""
    batch = cache.prepare(sequences, counts)
    if keys is not None:
        cache.write(LAYER, keys, values, batch)
    arrays = batch.host.states
    for layer in (1, 3):
        temporal = cache.plane("temporal", layer).numpy()
        for i, sequence in enumerate(sequences):
            assert (temporal[arrays.state_read.numpy()[i]] == sequence.num_computed_tokens).all()
            end = sequence.num_computed_tokens + int(batch.host.query_lens.numpy()[i])
            temporal[arrays.checkpoint_write.numpy()[i]] = arrays.checkpoint_lengths.numpy()[i]
            temporal[arrays.state_write.numpy()[i]] = end
        temporal[0] = 0
    cache.commit(batch)
    cache.check_invariants()


def test_layers_keep_their_index_and_groups_of_cross_attention_are_last():
    cache = make()
    assert [cache.group_of(0), cache.group_of(2)] == [1, 0]
    assert cache.num_blocks == (17, 9)
    assert cache.plane("temporal", 1).shape == cache.plane("temporal", 3).shape == (9, 4)
    assert (cache.max_cross_tokens, cache.num_states) == (12, 9)
    with pytest.raises(UnsupportedOption, match="keeps a state"):
        cache.group_of(3)


def test_a_step_writes_encoder_tokens_and_states_and_later_steps_see_both():
    cache = make()
    first, second = (cache.add_sequence(range(5), cross_tokens=count) for count in (9, 5))
    keys, values = normal(14, 2, 8, seed=1), normal(14, 2, 8, seed=2)
    run(cache, [first, second], 5, keys, values)
    cache.append_tokens([first, second], [1, 2])
    child = cache.fork(first)
    cache.reorder([second], [first])
    assert cache.block_map(1).holders.max() == 3
    expect_seen(cache, [child, second], [(keys[:9], values[:9])] * 2, LAYER)
    cache.check_invariants()
    for sequence in (first, second, child):
        cache.remove(sequence)
    assert not cache.block_map(1).holders.any()
    cache.check_invariants()


def test_a_cached_prefix_needs_the_digest_and_ends_at_its_state():
    cache = make()
    first = cache.add_sequence(range(11), cross_tokens=9, cross_digest=b"a")
    keys, values = normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    run(cache, [first], 11, keys, values)
    again = cache.add_sequence(range(11), cross_tokens=9, cross_digest=b"a")
    other = cache.add_sequence(range(11), cross_tokens=9, cross_digest=b"b")
    unnamed = cache.add_sequence(range(11), cross_tokens=9)
    assert [one.num_computed_tokens for one in (again, other, unnamed)] == [8, 0, 0]
    run(cache, [again], 3)
    run(cache, [unnamed], 11, keys, values)
    cache.remove(unnamed)
    cache.check_invariants()
    assert cache.match_length(range(11)) == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_swaps_bring_back_tokens_states_and_encoder_outputs(prefix_cache, dtype):
    cache = make(prefix_cache=prefix_cache)
    space = SwapSpace(cache, num_blocks=9, dtype=dtype)
    first = cache.add_sequence(range(9), cross_tokens=9, cross_digest=b"a")
    keys, values = (normal(9, 2, 8, seed=seed).astype("float16").astype("float32") for seed in (1, 2))
    run(cache, [first], 9, keys, values)
    child = cache.fork(first)
    cache.swap_out([first, child], space)
    assert space.num_used_blocks == 3 + 3
    space.check_invariants()
    cache.check_invariants()
    assert cache.shortage([first, child], 1) == 0
    assert cache.shortage([first, child], 20, step_tokens=4) == 0
    assert cache.shortage([first, child], 20, encoder_outputs=False) == 0
    for layer in (1, 3):
        cache.plane("temporal", layer).numpy()[1:] = np.nan
    cache.plane("key", LAYER).numpy()[:] = np.nan
    cache.swap_in([first, child])
    space.check_invariants()
    cache.append_tokens([first, child], [[5], [6]])
    run(cache, [first, child], 1)
    cache.append_tokens([first, child], [[5], [6]])
    expect_seen(cache, [first, child], [(keys, values)] * 2, LAYER)
    assert space.num_used_blocks == 0
    assert space.state_slots.num_used == 0


@pytest.mark.parametrize("in_place", [True, False])
def test_an_abandoned_first_step_gives_back_slots_and_encoder_blocks(in_place):
    spec = StateSpec(STATE.planes, chunk=4, interval=8, in_place=in_place)
    cache = PagedKVCache([CROSS, spec, OWN], block_size=4, num_blocks=[17, 9], num_states=9, max_sequences=4)
    before = cache.stats()
    sequence = cache.add_sequence(range(9), cross_tokens=9)
    cache.abandon(cache.prepare([sequence], 9))
    cache.check_invariants()
    assert cache.stats().num_free_blocks == before.num_free_blocks
    batch = cache.prepare([sequence], 9)
    assert batch.cross.num_tokens == 9
    cache.remove(sequence)
    assert cache.stats().num_free_states == before.num_free_states


def test_each_shortage_is_refused_by_its_name_and_takes_nothing():
    cache = make(num_states=4, num_blocks=[17, 4], max_sequences=4)
    first = cache.add_sequence(range(5), cross_tokens=12)
    waiting = cache.add_sequence(range(5), cross_tokens=4)
    encode(cache, first, 5, 1, LAYER)
    assert [cache.shortage([waiting], 5, encoder_outputs=counted) for counted in (True, False)] == [1, 0]
    before = cache.stats()
    with pytest.raises(OutOfBlocks, match=r"encoder tokens and 0 are free in group 1") as caught:
        cache.prepare([waiting], 5)
    assert (caught.value.requested, caught.value.available) == (1, 0)
    assert cache.stats() == before
    # A step that is refused before its arrays are made reports its own shortage, not that of the last step.
    long = cache.add_sequence(range(60), cross_tokens=None)
    cache.set_cross_tokens(long, 4)
    with pytest.raises(OutOfBlocks) as caught:
        cache.prepare([first, long], [10, 60])
    assert "encoder" not in str(caught.value)
    cache.remove(first)
    more = [waiting, *(cache.add_sequence(range(5), cross_tokens=1) for _ in range(2))]
    cache.remove(long)
    more.append(cache.add_sequence(range(5), cross_tokens=4, cross_digest=b"x"))
    cache.check_invariants()
    with pytest.raises(OutOfBlocks):
        cache.prepare(more, 5)
    run(cache, more[:2], 5, normal(5, 2, 8), normal(5, 2, 8))
    crowded = make(num_states=2, num_blocks=[17, 9])
    pair = [crowded.add_sequence(range(3), cross_tokens=4) for _ in range(2)]
    before = crowded.stats()
    assert crowded.shortage(pair, 3) == 1
    with pytest.raises(OutOfBlocks, match="state slots"):
        crowded.prepare(pair, 3)
    assert crowded.stats() == before
    crowded.check_invariants()


def test_swaps_that_lack_blocks_or_slots_are_refused_by_name():
    cache = make()
    sequence = cache.add_sequence(range(9), cross_tokens=9)
    run(cache, [sequence], 9, normal(9, 2, 8), normal(9, 2, 8))
    for sizes, match in (
        ({"num_blocks": [9, 3]}, "3 blocks are needed and 2 are free in group 1"),
        ({"num_blocks": 9, "num_states": 2}, "2 state slots are needed and 1 are free"),
    ):
        space = SwapSpace(cache, **sizes)
        with pytest.raises(OutOfBlocks, match=match):
            cache.swap_out([sequence], space)
        space.check_invariants()
        assert not sequence.is_swapped
    space = SwapSpace(cache, memory="1MiB")
    cache.swap_out([sequence], space)
    other = cache.add_sequence(range(3), cross_tokens=12)
    fill = cache.add_sequence(range(3), cross_tokens=12)
    run(cache, [other, fill], 3, normal(24, 2, 8), normal(24, 2, 8))
    with pytest.raises(OutOfBlocks, match=r"3 blocks are needed and 2 are \w+ in group 1"):
        cache.swap_in([sequence])
    cache.remove(fill)
    cache.swap_in([sequence])
    cache.check_invariants()


def test_scrubbed_caches_zero_slots_and_encoder_blocks():
    cache = make(scrub=True, num_blocks=[17, 4], num_states=3)
    first = cache.add_sequence(range(3), cross_tokens=12, namespace="a")
    run(cache, [first], 3, normal(12, 2, 8), normal(12, 2, 8))
    cache.remove(first)
    cache.prepare([cache.add_sequence(range(3), cross_tokens=12, namespace="b")], 3)
    assert not cache.plane("key", LAYER).numpy()[1:].any()
    assert not any(cache.plane("temporal", layer).numpy().any() for layer in (1, 3))


def test_attention_sees_encoder_tokens_between_steps_with_states():
    cache = make()
    sequence = cache.add_sequence(range(6), cross_tokens=7)
    keys, values = normal(7, 2, 8, seed=1), normal(7, 2, 8, seed=2)
    batch = cache.prepare([sequence], 6)
    cache.write(LAYER, keys, values, batch)
    query = normal(6, 4, 8, seed=3)
    found = cache.attend(LAYER, query, batch)
    np.testing.assert_allclose(found, attention(query, keys, values), rtol=0, atol=2e-6)
    cache.commit(batch)


def test_memory_is_divided_as_planned():
    plan = plan_memory(LAYERS, "64KiB", block_size=4, context=[8])
    cache = PagedKVCache(LAYERS, memory="64KiB", block_size=4, max_sequences=4)
    assert cache.num_blocks == tuple(group.num_blocks for group in plan.groups)
    assert cache.num_states == plan.states.num_slots
    assert [group.is_cross for group in plan.groups] == [False, True]
    assert plan.num_blocks == cache.num_blocks[0]
    assert cache.nbytes <= 64 * 1024


def test_models_without_layers_of_their_own_are_refused_by_name():
    for layers in ([CROSS, STATE], [STATE, CROSS]):
        with pytest.raises(UnsupportedOption, match="every layer that attends is a CrossSpec"):
            PagedKVCache(layers, num_blocks=9)
    with pytest.raises(UnsupportedOption, match="only a PagedKVCache serves"):
        StaticKVCache(LAYERS, max_length=8)
