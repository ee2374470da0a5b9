"""Lives of sampled blocks in the prefix cache: how long they stay, rest and wait for their next use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pagecore.cache.parts import PartsOwner, parts_of
from pagecore.cache.prefix._prefix import Durations, watched_pool
from pagecore.cache.state._state import Held
from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import as_float, require_int

__all__ = ["DURATION_BOUNDS", "BlockLives", "DurationHistogram"]

# Seconds; those of vLLM's histograms of block residency, and an hour.
DURATION_BOUNDS = tuple(
    [digit * 10.0**power for power in (-3, -2, -1, 0) for digit in (1, 2, 5)]
    + [10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0]
)


@dataclass(frozen=True)
class DurationHistogram:
    """A histogram of durations at one moment.

    Attributes
    ----------
    buckets : tuple of (float, int)
        Upper bound in seconds, and the number of durations up to it; the last bound is infinite.
    total_s : float
        Sum of the durations in seconds.
    """

    buckets: tuple[tuple[float, int], ...]
    total_s: float

    @property
    def count(self) -> int:
        """Number of durations."""
        return self.buckets[-1][1]


class BlockLives:
    """Times the lives of sampled blocks in the prefix cache.

    A life begins when the prefix cache takes a block, which is full and computed then, and ends when the prefix cache
    evicts it or replaces it by an equal block. Uses are the beginning and each prefix hit that includes the block. The
    sample is a fixed random set of block ids; blocks that the prefix cache holds at the start are not counted.

    A sampled block costs a clock read at each event, any other block one load. Without a `BlockLives` a cache times
    nothing; `close` ends the timing, and so does the collection of the object. (The figures are those of vLLM's
    `kv_block_*` metrics.)

    Parameters
    ----------
    cache : PagedKVCache
        A cache with a prefix cache.
    share : float
        Share of the blocks of each group to sample, above 0 and up to 1; at least one block is sampled.
    seed : int
        Seed of the sample.

    Raises
    ------
    UnsupportedOption
        `share` is outside its range, the cache has no prefix cache, or another object times its blocks.
    """

    def __init__(self, cache: PartsOwner, share: float = 0.01, seed: int = 0) -> None:
        share = as_float("share", share)
        if not 0 < share <= 1:
            raise UnsupportedOption(f"share is {share}; expected a number above 0 and up to 1")
        random = np.random.default_rng(require_int("seed", seed, 0, max=None))
        self._parts = parts_of(cache)
        if self._parts.prefix is None:
            raise UnsupportedOption("the cache was made with prefix_cache=False; only cached blocks have lives to time")
        bounds = np.rint(np.array(DURATION_BOUNDS) * 1e9).astype(np.int64)
        self._durations = {name: Durations(bounds) for name in ("lifetime", "idle_before_evict", "reuse_gap")}
        watched = []
        for pool in self._parts.tables.pools:
            count = max(1, round(share * (pool.num_blocks - 1)))
            blocks = 1 + random.choice(pool.num_blocks - 1, count, replace=False).astype(np.int32)
            watched.append(watched_pool(pool, np.sort(blocks), *self._durations.values()))
        with Held(self._parts.state.lock):
            if self._parts.prefix.is_watched:
                raise UnsupportedOption(
                    "the lives of this cache's blocks are timed already; close the other object first"
                )
            self._parts.prefix.watch(watched)
            self._is_open = True

    _is_open = False  # for the destructor, if the constructor raised

    def __del__(self) -> None:
        """End the timing at the next operation of the cache: the thread may hold its lock, or wait for another's."""
        if self._is_open and self._parts.prefix is not None:
            self._parts.prefix.lose_watch()

    def read(self) -> dict[str, DurationHistogram]:
        """Return the histograms "lifetime", "idle_before_evict" and "reuse_gap" of all groups; from any thread."""
        with Held(self._parts.state.lock):
            found = {name: durations.read() for name, durations in self._durations.items()}
        return {
            name: DurationHistogram(
                tuple(zip((*DURATION_BOUNDS, math.inf), accumulate(counts.tolist()), strict=True)), total / 1e9
            )
            for name, (counts, total) in found.items()
        }

    def close(self) -> None:
        """End the timing; `read` returns what was counted. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        assert self._parts.prefix is not None
        with Held(self._parts.state.lock):
            self._parts.prefix.watch(None)
