"""Lives of blocks in the prefix cache, against a twin that follows the block map."""

import gc
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import PagedKVCache
from pagecore.cache.inspect.block_life import DURATION_BOUNDS, BlockLives
from pagecore.errors import ShapeError, UnsupportedOption
from tests.cache.caches import SPEC, WINDOWED, advance, make

NUM_BLOCKS = 13


class Twin:
    """Counts lives from the blocks that the prefix cache holds before and after each operation.

    Times are pairs of a lower and an upper bound, because the cache reads its own clock in between.
    """

    def __init__(self, cache):
        self.cache = cache
        self.lives = {}
        self.used = {}
        self.sums = {name: [0, 0.0, 0.0] for name in ("lifetime", "idle_before_evict", "reuse_gap")}

    def cached(self):
        return set(np.flatnonzero(self.cache.block_map().cached).tolist())

    def note(self, name, since, now):
        counted = self.sums[name]
        counted[0] += 1
        counted[1] += max(now[0] - since[1], 0)
        counted[2] += now[1] - since[0]

    def add(self, tokens):
        before = self.cached()
        start = time.monotonic()
        sequence = self.cache.add_sequence(tokens)
        now = (start, time.monotonic())
        assert self.cached() == before
        hits = sequence.num_cached_tokens // self.cache.block_size
        for block in self.cache.block_table().numpy()[sequence.row, :hits].tolist():
            self.note("reuse_gap", self.used[block], now)
            self.used[block] = now
        return sequence

    def step(self, sequence, count):
        before = self.cached()
        start = time.monotonic()
        batch = self.cache.prepare([sequence], count)
        gone = before - self.cached()
        middle = self.cached()
        self.cache.commit(batch)
        now = (start, time.monotonic())
        for block in gone:
            self.note("lifetime", self.lives.pop(block), now)
            self.note("idle_before_evict", self.used.pop(block), now)
        for block in self.cached() - middle:
            self.lives[block] = self.used[block] = now


@settings(max_examples=25, deadline=None)
@given(heads=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=20))
def test_lives_equal_those_of_a_twin(heads):
    cache = make(num_blocks=NUM_BLOCKS)
    lives = BlockLives(cache, 1.0)
    twin = Twin(cache)
    for number, (head, length) in enumerate(heads):
        tokens = np.full(length + 8, 1000 + number, np.int32)
        tokens[:8] = head
        sequence = twin.add(tokens)
        twin.step(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        cache.remove(sequence)
    found = lives.read()
    for name, (count, least, most) in twin.sums.items():
        assert found[name].count == count
        assert least - 1e-6 <= found[name].total_s <= most + 1e-6
    assert found["lifetime"].count == cache.stats().num_evicted_blocks
    cache.check_invariants()


def fill(cache, number, length=16):
    sequence = cache.add_sequence(np.full(length, number, np.int32))
    advance(cache, [sequence], length - sequence.num_computed_tokens)
    cache.remove(sequence)


def test_buckets_are_cumulative_and_end_with_all():
    cache = make(num_blocks=9)
    lives = BlockLives(cache, 1.0)
    for number in range(6):
        fill(cache, number)
    histogram = lives.read()["lifetime"]
    bounds, counts = zip(*histogram.buckets, strict=True)
    assert bounds == (*DURATION_BOUNDS, math.inf)
    assert list(counts) == sorted(counts)
    assert counts[-1] == histogram.count == cache.stats().num_evicted_blocks == 16


def test_blocks_that_are_cached_at_the_start_are_not_counted():
    cache = make(num_blocks=9)
    fill(cache, 0, 24)
    lives = BlockLives(cache, 1.0)
    fill(cache, 0, 25)
    fill(cache, 1, 32)
    assert cache.stats().prefix_hit_tokens == 24
    assert cache.stats().num_evicted_blocks == 6
    assert {name: each.count for name, each in lives.read().items()} == dict.fromkeys(lives.read(), 0)
    fill(cache, 2, 32)
    assert lives.read()["lifetime"].count == 8


def test_a_share_of_the_blocks_is_sampled():
    cache = PagedKVCache(SPEC, block_size=4, num_blocks=401, device="none")
    lives = BlockLives(cache, 0.1, seed=3)
    for number in range(40):
        fill(cache, number, 160)
    assert cache.stats().num_evicted_blocks == 1200
    assert lives.read()["lifetime"].count == pytest.approx(120, abs=30)


def test_groups_with_windows_are_timed_too():
    cache = make([SPEC, WINDOWED], num_blocks=[9, 9])
    lives = BlockLives(cache, 1.0)
    for number in range(8):
        fill(cache, number)
        fill(cache, number, 17)
    found = lives.read()
    assert found["lifetime"].count >= cache.stats().num_evicted_blocks > 0
    assert found["reuse_gap"].count > 0
    cache.check_invariants()


@pytest.mark.parametrize("copies", ["fork", "reorder", "exchange"])
def test_a_tentative_sequence_that_is_copied_uses_the_blocks_it_began_with(copies):
    cache = make(num_blocks=13)
    lives = BlockLives(cache, 1.0)
    fill(cache, 0)
    other, parent = cache.add_sequence([1, 2, 3]), cache.add_sequence([0] * 17, tentative=True)
    advance(cache, [other], 3)
    assert lives.read()["reuse_gap"].count == 0
    if copies == "fork":
        cache.fork(parent)
    elif copies == "reorder":
        cache.reorder([other], [parent])
    else:
        cache.reorder([other, parent], [parent, other])
    assert lives.read()["reuse_gap"].count == 4
    cache.check_invariants()


def test_after_closing_nothing_is_counted_and_another_may_start():
    cache = make(num_blocks=9)
    lives = BlockLives(cache, 1.0)
    with pytest.raises(UnsupportedOption, match="timed already"):
        BlockLives(cache, 1.0)
    for number in range(6):
        fill(cache, number)
    lives.close()
    lives.close()
    counted = lives.read()["lifetime"].count
    for number in range(6, 12):
        fill(cache, number)
    assert lives.read()["lifetime"].count == counted == 16
    with_another = BlockLives(cache, 1.0)
    lives.close()
    assert cache._parts.prefix.is_watched
    with_another.close()
    cache.check_invariants()


def watched_pools(cache):
    """Return the number of pools by which the prefix cache times blocks."""
    lists = [each for each in gc.get_referents(cache._parts.prefix) if isinstance(each, list)]
    return sum(type(pool).__name__ == "WatchedPool" for each in lists for pool in each)


@pytest.mark.parametrize("ends", ["next operation", "next object"])
def test_an_object_that_is_collected_without_a_close_ends_the_timing(ends):
    cache = make(num_blocks=9)
    lives = BlockLives(cache, 1.0)
    fill(cache, 0)
    del lives
    gc.collect()
    assert not cache._parts.prefix.is_watched
    assert watched_pools(cache) == 1
    if ends == "next operation":
        fill(cache, 1)
        assert watched_pools(cache) == 0
    lives = BlockLives(cache, 1.0)
    assert cache._parts.prefix.is_watched
    for number in range(2, 8):
        fill(cache, number)
    assert lives.read()["lifetime"].count > 0
    assert cache._parts.prefix.is_watched
    lives.close()
    cache.check_invariants()


@pytest.mark.parametrize("share", [0, -0.1, 1.01, math.nan])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(UnsupportedOption, match="above 0 and up to 1"):
        BlockLives(make(), share)


def test_what_has_no_prefix_cache_or_no_blocks_is_refused():
    with pytest.raises(UnsupportedOption, match="prefix_cache=False"):
        BlockLives(make(prefix_cache=False))
    with pytest.raises(UnsupportedOption):
        BlockLives(None)
    with pytest.raises(ShapeError):
        BlockLives(make(), "0.5")
    with pytest.raises(ShapeError):
        BlockLives(make(), seed=-1)
