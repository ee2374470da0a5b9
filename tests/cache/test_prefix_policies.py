"""Eviction policies: the order of eviction, and the priorities and ranks of sequences."""

import pytest

from pagecore import (
    InvalidSequence,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.cache import SwapSpace
from tests.cache.caches import make
from tests.cache.prefixes import ALIKE, computed, kept


@pytest.mark.parametrize("priority", [-1, 101, float("nan"), float("inf"), "high"])
def test_a_priority_is_a_number_from_0_to_100(priority):
    with pytest.raises((ShapeError, UnsupportedDtype), match="priority"):
        make(eviction_policy="priority").add_sequence(ALIKE, priority=priority)


@pytest.mark.parametrize(("policy", "left"), [("lru", [1, 3]), ("mru", [2, 3]), ("fifo", [2, 3]), ("lfu", [1, 3])])
def test_the_policy_decides_the_order_of_eviction(policy, left):
    cache = make(num_blocks=7, eviction_policy=policy, device="none")
    for first in (100, 200, 300):
        kept(cache, range(first, first + 8))
    for first in (300, 100):
        cache.remove(cache.add_sequence(range(first, first + 9)))
    computed(cache, [1, 2])
    computed(cache, [3, 4])
    found = [i for i, first in enumerate((100, 200, 300), 1) if cache.match_length(range(first, first + 9)) == 8]
    assert found == left


def test_a_priority_holds_until_its_time_is_over():
    now = [0.0]
    cache = make(num_blocks=5, eviction_policy="priority", clock=lambda: now[0], device="none")
    kept(cache, range(100, 108), priority=90, time_to_live=10)
    kept(cache, range(200, 208))
    kept(cache, range(300, 304))
    assert cache.match_length(range(100, 109)) == 8
    now[0] = 11.0
    kept(cache, range(400, 412))
    assert cache.match_length(range(100, 109)) < 8


def test_a_rank_is_the_users_own_policy():
    cache = make(num_blocks=5, eviction_policy="rank", device="none")
    first, second = (computed(cache, range(start, start + 8), rank=rank) for start, rank in ((100, 2.0), (200, 1.0)))
    cache.remove(first)
    cache.remove(second, rank=3.0)
    kept(cache, [1, 2, 3, 4], rank=9.0)
    assert (cache.match_length(range(100, 109)), cache.match_length(range(200, 209))) == (4, 8)


def test_a_sequence_whose_blocks_are_all_cached_gives_its_rank_once():
    cache = make(num_blocks=5, eviction_policy="rank", device="none")
    prompt = list(range(100, 109))
    kept(cache, prompt[:8], rank=1.0)
    older, newer = (cache.add_sequence(prompt, rank=rank) for rank in (2.0, 5.0))
    for sequence in (older, newer):
        cache.remove(sequence)
    kept(cache, range(200, 208), rank=4.0)
    kept(cache, [1, 2, 3, 4], rank=9.0)
    assert (cache.match_length(prompt), cache.match_length(range(200, 209))) == (8, 4)


def test_a_rank_that_is_refused_leaves_the_sequence():
    cache = make()
    sequence = computed(cache, ALIKE[:9])
    with pytest.raises(UnsupportedOption, match="rank"):
        cache.remove(sequence, rank=1.0)
    cache.remove(sequence)
    with pytest.raises(InvalidSequence):
        cache.remove(sequence)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_rank_or_time_that_is_not_finite_is_refused_before_anything_changes(number):
    cache = make(eviction_policy="rank")
    with pytest.raises(ShapeError, match="rank"):
        cache.add_sequence(ALIKE, rank=number)
    sequence = computed(cache, ALIKE[:9])
    with pytest.raises(ShapeError, match="rank"):
        cache.remove(sequence, rank=number)
    cache.check_invariants()
    cache.remove(sequence)
    with pytest.raises(ShapeError, match="time_to_live"):
        make(eviction_policy="priority").add_sequence(ALIKE, priority=5, time_to_live=number)


@pytest.mark.parametrize("time", [float("nan"), "late", 10**400, RuntimeError("stopped")])
def test_a_clock_that_fails_changes_nothing(time):
    answers = [0.0]

    def clock():
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    cache = make(eviction_policy="priority", clock=clock)
    space = SwapSpace(cache, num_blocks=9)
    sequence, other = (computed(cache, ALIKE[:9], priority=50), cache.add_sequence(ALIKE[20:24]))
    batch = cache.prepare([other], 4)
    before = cache.stats()
    answers[0] = time
    for call in (
        lambda: cache.remove(sequence),
        lambda: cache.truncate(sequence, 2),
        lambda: cache.fork(sequence),
        lambda: cache.reorder([sequence], [sequence]),
        lambda: cache.swap_out(sequence, space),
        lambda: cache.prepare([sequence], 1),
        lambda: cache.commit(batch),
        lambda: cache.add_sequence(ALIKE),
        cache.clear_prefix_cache,
    ):
        with pytest.raises((ShapeError, UnsupportedDtype, RuntimeError)):
            call()
        assert cache.stats() == before
        cache.check_invariants()
    answers[0] = 1.0
    cache.commit(batch)
    cache.remove(sequence)


def test_a_clock_is_a_function():
    with pytest.raises(UnsupportedOption, match="clock"):
        make(clock=5)


def test_blocks_after_a_high_priority_prefix_have_the_priority_of_their_own_sequence():
    cache = make(num_blocks=7, block_size=4, eviction_policy="priority", device="none")
    kept(cache, ALIKE[:8], priority=90)
    kept(cache, ALIKE[:12])
    kept(cache, range(100, 108), priority=60)
    kept(cache, range(200, 208))  # two blocks, of which one is free
    assert (cache.match_length(ALIKE), cache.match_length(range(100, 109))) == (8, 8)
