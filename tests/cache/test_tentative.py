"""Sequences that are added, removed without a step because they lack room, and added again: each counts once."""

import random

import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec
from pagecore.errors import UnsupportedOption
from pagecore.serving import Request, Scheduler
from tests.cache.caches import make
from tests.cache.prefixes import computed, kept
from tests.serving.runs import sampled

FULL = AttentionSpec(1, 8)
SPECS = {
    "attention": [FULL],
    "window": [FULL, AttentionSpec(1, 8, window=6)],
    "hybrid": [FULL, StateSpec((Plane("temporal", (1,), "float32", per="sequence"),), chunk=4, interval=4)],
}


def figures(cache):
    stats = cache.stats()
    return (
        stats.prefix_hits, stats.prefix_misses, stats.prefix_query_tokens, stats.prefix_hit_tokens,
        stats.prefix_shared_tokens, stats.num_evicted_blocks, stats.num_evicted_states,
    )  # fmt: skip


def test_a_tentative_sequence_counts_from_its_first_step_on():
    cache = make(num_blocks=9, device="none")
    kept(cache, range(8))
    other = computed(cache, range(100, 124))
    before = figures(cache)
    for _ in range(3):
        cache.remove(cache.add_sequence(range(11), tentative=True))
    sequence = cache.add_sequence(range(11), tentative=True)
    assert sequence.num_cached_tokens == 8
    cache.commit(cache.prepare([sequence], 0))
    assert cache.try_prepare([sequence], 3) is None
    assert figures(cache) == before
    cache.remove(other)
    cache.abandon(cache.prepare([sequence], 3))
    after = figures(cache)
    assert after == (before[0] + 1, before[1], before[2] + 11, before[3] + 8, before[4] + 8, 1, 0)
    for count in (2, 1):
        cache.commit(cache.prepare([sequence], count))
    cache.fork(sequence)
    assert figures(cache) == after
    cache.check_invariants()
    waiting = cache.add_sequence(range(40, 44), tentative=True)
    cache.check_invariants()
    cache.reorder([waiting], [sequence])
    cache.check_invariants()
    assert figures(cache) == after
    with pytest.raises(UnsupportedOption, match="tentative is 1"):
        cache.add_sequence(range(4), tentative=1)


@pytest.mark.parametrize(("length", "hits"), [(0, 0), (3, 0), (4, 1), (8, 1)])
def test_a_tentative_sequence_that_is_cut_counts_what_is_left(length, hits):
    cache = make(num_blocks=9, device="none")
    kept(cache, range(8))
    before = figures(cache)
    sequence = cache.add_sequence(range(9), tentative=True)
    cache.truncate([sequence], [length])
    cache.append_tokens([sequence], [[5, 6]])
    cache.commit(cache.prepare([sequence], 2))
    tokens = length // 4 * 4
    added = [now - old for now, old in zip(figures(cache), before, strict=True)]
    assert added == [hits, 1 - hits, length + 2, tokens, tokens, 0, 0]
    cache.check_invariants()


@pytest.mark.parametrize("copies", ["fork", "reorder"])
def test_a_tentative_sequence_counts_when_it_is_copied(copies):
    cache = make(num_blocks=9, device="none")
    kept(cache, range(8))
    other = computed(cache, [9])
    before = figures(cache)
    parent = cache.add_sequence(range(9), tentative=True)
    if copies == "fork":
        other = cache.fork(parent)
    else:
        cache.reorder([other], [parent])
    cache.remove(parent)
    cache.commit(cache.prepare([other], 1))
    added = [now - old for now, old in zip(figures(cache), before, strict=True)]
    assert added == [1, 0, 9, 8, 8, 0, 0]
    cache.check_invariants()


@pytest.mark.parametrize(("policy", "left"), [("lfu", 200), ("slru:0.5", 200), ("lru", 100)])
def test_repeated_attempts_are_not_hits_for_the_eviction_policy(policy, left):
    """The second prefix was hit once before; the first was only looked at, but later."""
    cache = make(num_blocks=5, eviction_policy=policy, device="none")
    for first in (100, 200):
        kept(cache, range(first, first + 8))
    cache.remove(cache.add_sequence(range(200, 209)))
    for _ in range(3):
        cache.remove(cache.add_sequence(range(100, 109), tentative=True))
    computed(cache, [1, 2, 3, 4])
    assert [first for first in (100, 200) if cache.match_length(range(first, first + 9)) == 8] == [left]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "mru"])
def test_attempts_leave_the_cache_as_without_them(policy, kind):
    """Two caches serve the same prompts; in one of them each prompt is tried some times before it runs."""
    choice = random.Random(3)
    options = {"num_states": 7} if kind == "hybrid" else {}
    caches = [
        PagedKVCache(
            SPECS[kind], block_size=4, num_blocks=24, max_sequences=3, device="none", eviction_policy=policy, **options
        )
        for _ in range(2)
    ]
    prompts = [[head] * choice.randint(4, 20) + [9 + head] * choice.randint(1, 12) for head in range(7)]
    for _ in range(70):
        prompt = choice.choice(prompts)
        prompt = prompt[: choice.randint(4, len(prompt))]
        for cache, attempts in zip(caches, (0, choice.randint(0, 3)), strict=True):
            for _ in range(attempts):
                cache.remove(cache.add_sequence(prompt, tentative=True))
            with cache.add_sequence(prompt, tentative=attempts > 0) as sequence:
                cache.commit(cache.prepare([sequence], len(prompt) - sequence.num_computed_tokens))
        cache.check_invariants()
        assert figures(caches[0]) == figures(caches[1])
        assert [caches[0].match_length(one) for one in prompts] == [caches[1].match_length(one) for one in prompts]
    assert figures(caches[0])[5] > 10


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_request_that_waits_for_room_counts_once(policy):
    cache = PagedKVCache(FULL, block_size=4, num_blocks=17, max_sequences=4, device="none")
    scheduler = Scheduler(cache, policy=policy, headroom=0.0, new_token_ratio=0.7)
    attempts = 0
    for number in range(8):
        scheduler.add(Request(number, [5] * 8 + [number] * 14, 8, ignore_eos=True))
    while (step := scheduler.schedule()) is not None:
        attempts += scheduler.num_waiting > 0
        scheduler.commit(step)
        scheduler.accept(step, sampled(step))
    stats, reuse = cache.stats(), scheduler.reuse
    assert (scheduler.num_preemptions, reuse.num_recovered_tokens) == (0, 0)
    assert attempts > 8
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (reuse.prefix_query_tokens, reuse.prefix_hit_tokens)
    assert stats.prefix_hits + stats.prefix_misses == 8
    assert stats.prefix_hit_tokens == 7 * 8
