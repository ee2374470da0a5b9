"""Priorities that expire, in a host tier: it evicts like a cache of its own size."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers

SPEC = AttentionSpec(1, 8, dtype="float32")
FIRST, SECOND, THIRD = (list(range(start, start + 16)) for start in (0, 100, 200))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def cached(num_blocks, clock):
    return PagedKVCache(
        SPEC, num_blocks=num_blocks, block_size=4, device="none", eviction_policy="priority", clock=clock
    )


def serve(cache, ids, **options):
    with cache.add_sequence(ids, **options) as sequence:
        cache.commit(cache.prepare([sequence], len(ids) - sequence.num_cached_tokens))


@pytest.mark.parametrize(
    "expires", [{"priority": [(0, None, 90, 5.0)]}, {"priority": 90, "time_to_live": 5.0}], ids=["range", "prefix"]
)
@pytest.mark.parametrize(("now", "left"), [(4.0, [16, 0, 16]), (5.0, [0, 16, 16]), (50.0, [0, 16, 16])])
def test_a_priority_that_has_expired_counts_no_more_in_the_host(expires, now, left):
    clock = Clock()
    cache = cached(65, clock)
    with Tiers(cache, HostTier(cache, num_blocks=9, policy="priority"), min_tokens=1) as tiers:
        serve(cache, FIRST, **expires)
        serve(cache, SECOND, priority=50)
        clock.now = now
        cache.clear_prefix_cache()
        serve(cache, THIRD, priority=50)
        cache.clear_prefix_cache()
        assert [tiers.match_length([*ids, 1]) for ids in (FIRST, SECOND, THIRD)] == left
        tiers.check_invariants()


def test_a_load_evicts_a_priority_that_has_expired_first():
    clock = Clock()
    cache = cached(65, clock)
    with Tiers(cache, HostTier(cache, num_blocks=9, policy="priority"), min_tokens=1) as tiers:
        serve(cache, FIRST, priority=90, time_to_live=5.0)
        serve(cache, SECOND, priority=50)
        clock.now = 6.0
        cache.clear_prefix_cache()
        tiers.host.reserve([np.arange(4)]).release()
        assert [tiers.match_length([*ids, 1]) for ids in (FIRST, SECOND)] == [0, 16]


@pytest.mark.parametrize("seed", range(10))
def test_hosts_evict_the_lowest_priority_that_has_not_expired(seed):
    """The twin keeps (priority, expiry, last use) of each prompt; all prompts have four blocks, the host 16."""
    random, clock = np.random.default_rng(seed), Clock()
    cache = cached(65, clock)
    prompts = [list(range(100 * i, 100 * i + 17)) for i in range(8)]
    kept: dict[int, tuple[float, float, int]] = {}

    def current(value):
        return (35.0, np.inf) if value[1] <= clock.now else value[:2]

    with Tiers(cache, HostTier(cache, num_blocks=17, policy="priority"), min_tokens=1) as tiers:
        for turn in range(80):
            clock.now += float(random.integers(1, 3))
            number = int(random.integers(len(prompts)))
            new = float(random.integers(1, 5) * 20), np.inf
            options = {"priority": new[0]}
            if random.random() < 0.6:
                options["time_to_live"] = float(random.integers(1, 12)) + 0.5
                new = new[0], clock.now + options["time_to_live"]
            serve(cache, prompts[number], **options)
            cache.clear_prefix_cache()
            if number in kept:
                new = max(current(kept.pop(number)), new)
            elif len(kept) == 4:
                kept.pop(min(kept, key=lambda one: (current(kept[one])[0], kept[one][2])))
            kept[number] = *new, turn
            assert [tiers.match_length(each) for each in prompts] == [16 * (i in kept) for i in range(len(prompts))]
        tiers.check_invariants()
