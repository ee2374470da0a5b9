"""Slots of states that the prefix cache evicts while sequences keep them as checkpoints."""

import numpy as np

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec

STATE = StateSpec((Plane("temporal", (2, 4), "float32", per="sequence"),), chunk=4, interval=8)


def make(num_states, eviction_policy="lru"):
    return PagedKVCache(
        [AttentionSpec(1, 8), STATE],
        num_blocks=200,
        num_states=num_states,
        block_size=4,
        max_sequences=8,
        device="none",
        eviction_policy=eviction_policy,
    )


def run(cache, first, count=6):
    """Add a sequence and compute its tokens: it then has a running slot, and a checkpoint after 4 tokens."""
    sequence = cache.add_sequence(np.arange(first, first + count))
    cache.commit(cache.prepare([sequence], count - sequence.num_computed_tokens))
    return sequence


def test_the_oldest_state_is_evicted_although_a_sequence_keeps_it():
    cache = make(num_states=9)
    kept = [run(cache, first) for first in (0, 100, 200)]
    cache.remove(run(cache, 300))  # its state is the newest, and held by the prefix cache alone
    stats = cache.stats()
    assert (stats.num_states, stats.num_free_states, stats.num_cached_states, stats.num_evicted_states) == (8, 1, 4, 0)
    for token in (7, 8):
        taker = cache.add_sequence([token])
        cache.commit(cache.prepare([taker], 1))
    stats = cache.stats()
    assert (stats.num_free_states, stats.num_cached_states, stats.num_evicted_states) == (0, 3, 1)
    assert [cache.match_length(np.arange(first, first + 6)) for first in (0, 100, 200, 300)] == [0, 4, 4, 4]
    cache.check_invariants()
    cache.append_tokens(kept[:1], [[8]])
    cache.commit(cache.prepare(kept[:1], 1))
    assert kept[0].num_computed_tokens == 7
    cache.check_invariants()


def test_a_sequence_that_lost_its_checkpoint_is_abandoned_to_its_beginning():
    cache = make(num_states=4)
    sequence = run(cache, 0)
    taker = cache.add_sequence([7])
    cache.commit(cache.prepare([taker], 1))
    assert (cache.stats().num_free_states, cache.stats().num_evicted_states) == (0, 0)
    other = cache.add_sequence([8])
    cache.commit(cache.prepare([other], 1))
    assert cache.stats().num_evicted_states == 1
    cache.append_tokens([sequence], [[9]])
    cache.abandon(cache.prepare([sequence], 1))
    assert sequence.num_computed_tokens == 0
    cache.check_invariants()


def test_the_checkpoint_of_a_step_in_flight_is_not_taken():
    cache = make(num_states=4)
    sequence = run(cache, 0)
    cache.append_tokens([sequence], [[9]])
    batch = cache.prepare([sequence], 1)
    taker = run(cache, 100, 2)
    other = cache.add_sequence([8])
    assert cache.try_prepare([other], 1) is None
    cache.abandon(batch)
    assert sequence.num_computed_tokens == 4
    cache.remove(taker)
    cache.check_invariants()


def test_slru_protects_the_state_before_a_branch():
    cache = make(num_states=6, eviction_policy="slru")
    for question in (50, 60):
        sequence = cache.add_sequence([*range(8), *range(question, question + 4)])
        cache.commit(cache.prepare([sequence], 12 - sequence.num_computed_tokens))
        cache.remove(sequence)
    assert cache.match_length([*range(8), 7]) == 8  # the second prompt has left a state where it departs from the first
    for first in range(100, 800, 100):
        cache.remove(run(cache, first))
    assert cache.match_length([*range(8), 7]) == 8
    assert cache.match_length([*range(8), *range(50, 54), 7]) == 8, "the state of one prompt alone is gone"
    assert cache.stats().num_evicted_states > 3
    cache.check_invariants()
