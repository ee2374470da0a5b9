"""Slots of states that are short, swapped or scrubbed."""

import numpy as np
import pytest

from pagecore import PagedKVCache, StateSpec, SwapSpace
from pagecore.errors import OutOfBlocks, UnsupportedOption
from tests.cache.hybrids import FULL, PLANE, compute, make, table, temporal


def test_states_are_evicted_alone_when_slots_are_short():
    cache = make(num_states=4)
    first = cache.add_sequence(range(64))
    compute(cache, first, 64)
    cache.remove(first)
    assert cache.stats().num_cached_states == 1
    others = [cache.add_sequence([i]) for i in range(3)]
    for other in others:
        compute(cache, other, 1)
    stats = cache.stats()
    assert (stats.num_cached_states, stats.num_evicted_states, stats.num_cached_blocks) == (0, 1, 4)
    assert cache.match_length(range(65)) == 0
    again = cache._parts.prefix.tree.match(list(range(65)))
    assert (again.num_tokens, again.num_shared_tokens) == (0, 64)


def test_states_are_evicted_with_their_blocks():
    cache = make(num_blocks=6)
    first = cache.add_sequence(range(64))
    compute(cache, first, 64)
    cache.remove(first)
    compute(cache, cache.add_sequence(range(100, 180)), 80)
    assert (cache.stats().num_evicted_states, cache.stats().num_evicted_blocks) == (1, 4)


def test_without_slots_a_step_is_refused_and_changes_nothing():
    cache = make(num_states=3)
    sequences = [cache.add_sequence([i]) for i in range(3)]
    for sequence in sequences[:2]:
        compute(cache, sequence, 1)
    before = cache.stats()
    assert cache.shortage([sequences[2]], 1) == 1
    assert cache.shortage(sequences[:2], 5) == 0
    with pytest.raises(OutOfBlocks, match="1 state slots are needed and 0 are available") as error:
        cache.prepare([sequences[2]], 1)
    assert (error.value.requested, error.value.available) == (1, 0)
    assert cache.try_prepare([sequences[2]], 1) is None
    assert cache.stats() == before
    cache.check_invariants()


def test_a_checkpoint_is_left_out_before_a_step_is_refused():
    cache = make(num_states=2)
    sequence = cache.add_sequence(range(100))
    batch = compute(cache, sequence, 100)
    assert not batch.checkpoint_write.numpy().any()
    cache.abandon(cache.prepare([sequence], 1))
    assert sequence.num_computed_tokens == 0


def test_idle_sequences_lose_their_checkpoints_before_a_step_is_refused():
    cache = make(num_states=3, prefix_cache=False)
    first, second = cache.add_sequence(range(100)), cache.add_sequence([1])
    compute(cache, first, 100)
    assert table(cache).checkpoint(first.row) is not None
    compute(cache, second, 1)
    assert table(cache).checkpoint(first.row) is None


def test_states_travel_with_a_swapped_sequence():
    cache = make(num_states=6)
    space = SwapSpace(cache, num_blocks=20, num_states=4)
    sequence = cache.add_sequence(range(100))
    compute(cache, sequence, 90)
    child = cache.fork(sequence)
    cache.swap_out([sequence, child], space)
    cache.clear_prefix_cache()
    cache.check_invariants()
    assert (table(cache).slots.num_used, space.state_slots.num_used, space.num_states) == (0, 2, 4)
    for layer in (1, 3):
        temporal(cache, layer)[1:] = np.nan
    assert cache.shortage([sequence, child], 0) == 0
    cache.swap_in([child, sequence])
    cache.check_invariants()
    assert (space.state_slots.num_used, table(cache).checkpoint(sequence.row)[1]) == (0, 64)
    compute(cache, sequence, 1)
    compute(cache, child, 1)
    cache.truncate(sequence, 64)
    compute(cache, sequence, 1)


def test_a_space_without_slots_refuses_a_sequence():
    cache = make()
    space = SwapSpace(cache, num_blocks=20, num_states=2)
    sequence = cache.add_sequence(range(100))
    compute(cache, sequence, 90)
    before = cache.stats()
    with pytest.raises(OutOfBlocks, match="2 state slots are needed and 1 are free"):
        cache.swap_out([sequence], space)
    assert cache.stats() == before
    with pytest.raises(UnsupportedOption, match="num_states is given"):
        SwapSpace(PagedKVCache(FULL, num_blocks=3), num_blocks=3, num_states=3)


def test_a_space_divides_its_memory_like_the_cache():
    cache = make()
    space = SwapSpace(cache, memory=cache.nbytes // 2)
    assert cache.nbytes // 2 - 2048 < space.nbytes <= cache.nbytes // 2
    assert space.num_states == cache.num_states // 2


@pytest.mark.parametrize("in_place", [True, False])
def test_scrub_zeroes_slots_that_another_namespace_used(in_place):
    cache = make(StateSpec((PLANE,), in_place=in_place), scrub=True)
    assert not temporal(cache).any()
    first = cache.add_sequence(range(100), namespace="a")
    compute(cache, first, 100)
    cache.remove(first)
    cache.clear_prefix_cache()
    temporal(cache)[1:] = 5
    second = cache.add_sequence(range(100), namespace="b")
    batch = cache.prepare([second], 100)
    for slots in (batch.state_read, batch.state_write, batch.checkpoint_write):
        assert not temporal(cache)[slots.numpy()].any()
