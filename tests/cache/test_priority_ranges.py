"""Priorities of ranges of tokens, against a plain list of blocks."""

from itertools import pairwise

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, ShapeError, UnsupportedOption
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.faults import is_full
from tests.together import together

SPEC = AttentionSpec(1, 8)
DEFAULT = 35.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(num_blocks=65, block_size=4, clock=None, **options):
    return PagedKVCache(
        SPEC,
        num_blocks=num_blocks,
        block_size=block_size,
        device="none",
        eviction_policy="priority",
        clock=clock or Clock(),
        **options,
    )


def serve(cache, tokens, steps=1, **options):
    """Compute a prompt in a number of steps and remove it; return the tokens that were cached."""
    with cache.add_sequence(tokens, **options) as sequence:
        cached = sequence.num_cached_tokens
        for end in np.linspace(cached, len(tokens), steps + 1).astype(int)[1:]:
            if end > sequence.num_computed_tokens:
                cache.commit(cache.prepare([sequence], end - sequence.num_computed_tokens))
    return cached


def kept(cache, prompts):
    """Return the whole blocks of each prompt that are cached."""
    return [cache.match_length(np.append(tokens, -1)) // cache.block_size for tokens in prompts]


def evict(cache, count):
    """Evict a number of blocks, and free the memory that they were needed for."""
    free = cache.stats().num_free_blocks
    with cache.add_sequence([]) as taker:
        cache.abandon(cache.prepare([taker], (free + count) * cache.block_size))


def priority_of(ranges, token):
    return next((each[2] for each in ranges if each[0] <= token and (each[1] is None or token < each[1])), DEFAULT)


class Plain:
    """Chains of blocks with a priority each: of the last blocks, the lowest goes first, then the oldest."""

    def __init__(self):
        self.chains = []

    def add(self, num_blocks, ranges, size):
        self.chains.append([priority_of(ranges, index * size) for index in range(num_blocks)])

    def evict(self):
        worst = min((chain[-1], age) for age, chain in enumerate(self.chains) if chain)
        self.chains[worst[1]].pop()


def random_ranges(random, length):
    cuts = np.unique(random.integers(0, length + 8, int(random.integers(2, 8)))).tolist()
    ranges = [(start, end, int(random.integers(0, 6)) * 15) for start, end in pairwise(cuts)]
    chosen = [each for each in ranges if random.random() < 0.8]
    if random.random() < 0.3 and chosen:
        chosen[-1] = (chosen[-1][0], None, chosen[-1][2])
    return chosen


@pytest.mark.parametrize("seed", range(20 if is_full() else 10))
@pytest.mark.parametrize("block_size", [1, 4])
def test_blocks_go_by_the_priority_of_their_range(seed, block_size):
    random = np.random.default_rng(seed)
    cache, plain, prompts = make(400 // block_size, block_size), Plain(), []
    for number in range(8):
        tokens = 1000 * (number + 1) + np.arange(int(random.integers(1, 40)))
        ranges = random_ranges(random, len(tokens))
        serve(cache, tokens, int(random.integers(1, 4)), priority=ranges)
        plain.add(len(tokens) // block_size, ranges, block_size)
        prompts.append(tokens)
    cache.check_invariants()
    while any(plain.chains):
        assert kept(cache, prompts) == list(map(len, plain.chains))
        evict(cache, 1)
        plain.evict()
    assert kept(cache, prompts) == [0] * 8


def test_shared_blocks_keep_the_higher_priority():
    cache = make()
    system, chats = [7] * 8, [[7] * 8 + [number] * 8 for number in (1, 2)]
    serve(cache, system, priority=5)
    serve(cache, chats[0], priority=[(0, 8, 90), (8, None, 10)])
    serve(cache, chats[1], priority=[(0, 8, 0), (8, None, 20)])
    serve(cache, [100] * 8)
    others = [system, *chats, [100] * 8]
    assert kept(cache, others) == [2, 4, 4, 2]
    evict(cache, 4)
    assert kept(cache, others) == [2, 2, 2, 2]
    evict(cache, 2)
    assert kept(cache, others) == [2, 2, 2, 0]
    cache.check_invariants()


def test_generated_tokens_have_the_range_without_an_end():
    cache = make(num_blocks=9)
    with cache.add_sequence(range(8), priority=[(0, 8, 80), (8, None, 10)]) as sequence:
        cache.commit(cache.prepare([sequence], 8))
        for token in range(8, 16):
            cache.append_tokens(sequence, token)
            cache.commit(cache.prepare([sequence], 1))
    serve(cache, [50] * 8, priority=40)
    evict(cache, 2)
    assert kept(cache, [range(16), [50] * 8]) == [2, 2]
    evict(cache, 2)
    assert kept(cache, [range(16), [50] * 8]) == [2, 0]


def test_a_fork_keeps_its_ranges():
    cache = make()
    first = cache.add_sequence(range(8), priority=[(8, None, 90)])
    cache.commit(cache.prepare([first], 8))
    fork = cache.fork(first)
    cache.append_tokens([fork], [[1, 2, 3, 4]])
    cache.commit(cache.prepare([fork], 4))
    cache.remove(first)
    cache.remove(fork)
    serve(cache, [50] * 8, priority=60)
    evict(cache, 2)
    assert kept(cache, [[*range(8), 1, 2, 3, 4], [50] * 8]) == [3, 0]


@pytest.mark.parametrize("own", [True, False])
def test_priorities_of_ranges_end(own):
    clock = Clock()
    cache = make(clock=clock)
    limit = (10.0,) if own else ()
    serve(cache, range(8), priority=[(0, 4, 80), (4, None, 90, *limit)], time_to_live=None if own else 10.0)
    serve(cache, [50] * 8, priority=50)
    clock.now = 9.0
    evict(cache, 1)
    assert kept(cache, [range(8), [50] * 8]) == [2, 1]
    clock.now = 10.0
    evict(cache, 1)
    assert kept(cache, [range(8), [50] * 8]) == [1, 1]
    evict(cache, 1)
    assert kept(cache, [range(8), [50] * 8]) == ([1, 0] if own else [0, 1])


@pytest.mark.parametrize("ranged", [False, True])
def test_a_sequence_whose_blocks_are_all_cached_raises_their_priority(ranged):
    cache = make()
    serve(cache, range(8))
    assert serve(cache, [*range(8), 99], priority=[(0, 4, 90), (4, None, 20)] if ranged else 90) == 8
    serve(cache, [50] * 8, priority=60)
    evict(cache, 2)
    assert kept(cache, [range(8), [50] * 8]) == ([1, 1] if ranged else [2, 0])


@pytest.mark.parametrize("ranged", [False, True])
def test_a_time_to_live_begins_when_its_last_sequence_is_removed(ranged):
    clock = Clock()
    cache = make(clock=clock)
    option = {"priority": [(0, None, 80, 10.0)]} if ranged else {"priority": 80, "time_to_live": 10.0}
    prompt = [*range(8), 99]
    first = cache.add_sequence(prompt, **option)
    cache.commit(cache.prepare([first], 9))
    serve(cache, [50] * 8, priority=50)
    clock.now = 20.0
    assert serve(cache, prompt, **option) == 8
    clock.now = 25.0
    cache.remove(first)
    clock.now = 34.0
    evict(cache, 1)
    assert kept(cache, [range(8), [50] * 8]) == [2, 1]
    clock.now = 35.0
    evict(cache, 1)
    assert kept(cache, [range(8), [50] * 8]) == [1, 1]
    cache.check_invariants()


def test_of_equal_priorities_the_longer_time_to_live_counts():
    clock = Clock()
    cache = make(clock=clock)
    for seconds in (None, 5.0):
        serve(cache, range(8), priority=80, time_to_live=seconds)
    serve(cache, [50] * 8, priority=50)
    clock.now = 9.0
    evict(cache, 2)
    assert kept(cache, [range(8), [50] * 8]) == [2, 0]


def test_a_host_tier_keeps_the_ranges():
    cache = make()
    with HostTier(cache, num_blocks=65, policy="priority") as host:
        for tokens, priority in ((range(16), [(0, 8, 90), (8, 16, 5)]), ([50] * 8, 20)):
            with cache.add_sequence(tokens, priority=priority) as sequence:
                cache.commit(cache.prepare([sequence], len(tokens)))
                host.backup(sequence)
        assert host.make_room([host.block_pools[0].num_free + 4])
        assert (host.match([*range(16), 0]), host.match([50] * 9)) == (8, 0)
        host.check_invariants()


def test_a_full_hit_renews_the_priorities_of_the_copy():
    cache = make()
    with Tiers(cache, HostTier(cache, num_blocks=65, policy="priority"), min_tokens=1) as tiers:
        host = tiers.host
        for tokens, priority in (
            (range(16), 10), ([50] * 8, 20), ([60] * 8, 5), (range(16), [(0, 8, 90)]), ([60] * 8, 4),
        ):  # fmt: skip
            serve(cache, tokens, priority=priority)
        assert host.stats().num_backed_up_blocks == 8
        assert host.make_room([host.block_pools[0].num_free + 6])
        assert [host.match([*tokens, 0]) for tokens in (range(16), [50] * 8, [60] * 8)] == [8, 0, 0]
        tiers.check_invariants()


def test_the_time_to_live_of_a_copy_begins_when_its_sequence_is_removed():
    clock = Clock()
    cache = make(clock=clock)
    with Tiers(cache, HostTier(cache, num_blocks=65, policy="priority"), min_tokens=1) as tiers:
        with cache.add_sequence(range(8), priority=80, time_to_live=5.0) as sequence:
            cache.commit(cache.prepare([sequence], 8))
            clock.now = 100.0
        clock.now = 104.0
        serve(cache, [50] * 8, priority=50)
        assert tiers.host.make_room([tiers.host.block_pools[0].num_free + 2])
        assert [tiers.host.match([*tokens, 0]) for tokens in (range(8), [50] * 8)] == [8, 0]


@pytest.mark.parametrize(
    ("priority", "blocks"),
    [
        (50, 4),
        (49, 0),
        (None, 0),
        ([(0, 9, 50)], 3),
        ([(0, 8, 50), (8, 12, 0), (12, None, 99)], 2),
        ([(4, None, 99)], 0),
    ],
)
def test_blocks_of_small_priorities_are_not_backed_up(priority, blocks):
    cache = make()
    with (
        HostTier(cache, num_blocks=65, min_priority=50) as host,
        cache.add_sequence(range(16), priority=priority) as one,
    ):
        cache.commit(cache.prepare([one], 16))
        assert host.backup(one) == blocks
        assert host.match(range(17)) == 4 * blocks
        host.check_invariants()


def test_a_spilling_tier_keeps_blocks_of_large_priorities_alone():
    cache = make(num_blocks=9)
    prompts = {0: 20, 100: 90, 200: 5, 300: 50}
    with Tiers(cache, HostTier(cache, num_blocks=65, min_priority=50), write="on_evict", min_tokens=1) as tiers:
        for start, priority in prompts.items():
            serve(cache, range(start, start + 16), priority=priority)
        evict(cache, 8)
        tiers.drain()
        assert [tiers.host.match(range(start, start + 17)) for start in prompts] == [0, 16, 0, 16]
        tiers.check_invariants()


def test_the_smallest_priority_of_a_copy_is_checked():
    with pytest.raises(UnsupportedOption, match=r"min_priority is 50, but .* eviction_policy='lru'"):
        HostTier(PagedKVCache(SPEC, num_blocks=9), num_blocks=9, min_priority=50)
    for number in (-1, 101, float("nan"), "high"):
        with pytest.raises(ShapeError, match="min_priority"):
            HostTier(make(), num_blocks=9, min_priority=number)


@together(
    ("given", "error"),
    [
        ([(0, 4, 101)], ShapeError),
        ([(0, 4, -1)], ShapeError),
        ([(0, 4, float("nan"))], ShapeError),
        ([(0, 4, "high")], ShapeError),
        ([(0, 4)], ShapeError),
        ([(0, 4, 5, 6, 7)], ShapeError),
        ([5], ShapeError),
        ([(-1, 4, 5)], ShapeError),
        ([(4, 3, 5)], ShapeError),
        ([(0, 4, 5), (3, 8, 5)], ShapeError),
        ([(0, None, 5), (8, 9, 5)], ShapeError),
        ([(0, 4, 5, -1)], ShapeError),
        ([(0.5, 4, 5)], ShapeError),
        ([(0, 2**40, 5)], ShapeError),
        ("50", ShapeError),
        (np.array([5.0, 6.0]), ShapeError),
    ],
)
def test_invalid_ranges_are_refused(given, error):
    cache = make()
    with pytest.raises(error):
        cache.add_sequence(range(8), priority=given)
    assert cache.num_sequences == 0


def test_ranges_need_the_policy():
    cache = PagedKVCache(SPEC, num_blocks=9)
    with pytest.raises(UnsupportedOption, match="no effect with policy 'lru'"):
        cache.add_sequence(range(8), priority=[(0, 4, 5)])
    assert make().add_sequence(range(8), priority=[], time_to_live=3).num_tokens == 8
