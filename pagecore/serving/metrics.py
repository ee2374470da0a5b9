"""Statistics of a run of any length in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pagecore.errors import ShapeError
from pagecore.storage.checks import as_float, require_int

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagecore.cache import CacheStats
    from pagecore.serving.scheduling.reuse import Reuse

__all__ = ["Histogram", "Metrics", "Series", "TierCounts", "TierSource"]

# Values below 128 are exact; above, each octave has 128 buckets, so a percentile is off by less than 1 in 128.
BUCKET_BITS = 7
BUCKETS = 1 << BUCKET_BITS


class TierCounts(Protocol):
    """Statistics of tiers."""

    @property
    def hit_tokens(self) -> Mapping[str, int]:
        """Prompt tokens that were reused so far, by medium."""


class TierSource(Protocol):
    """Tiers of a cache. `stats` may be called from any thread."""

    def stats(self) -> TierCounts:
        """Return the statistics so far."""


class Histogram:
    """Percentiles of non-negative integers, as in HdrHistogram: exact up to 127, within 0.8% above."""

    def __init__(self) -> None:
        self.count = 0
        self.maximum = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: int) -> None:
        """Count one value.

        Raises
        ------
        ShapeError
            `value` is not an integer, or is negative.
        """
        value = require_int("value", value, 0, max=None)
        shift = max(value.bit_length() - BUCKET_BITS - 1, 0)
        key = (shift << (BUCKET_BITS + 1)) + (value >> shift)
        self._buckets[key] = self._buckets.get(key, 0) + 1
        self.count += 1
        self.maximum = max(self.maximum, value)

    def percentile(self, percent: float) -> int:
        """Return the smallest value that `percent` of the counted values do not exceed; 0 if none was counted.

        The result is the upper end of the bucket of that value.

        Raises
        ------
        ShapeError
            `percent` is not a number from 0 to 100.
        """
        percent = as_float("percent", percent)
        if not 0 <= percent <= 100:
            raise ShapeError(f"percent is {percent}; expected a number between 0 and 100")
        wanted = self.count * percent / 100
        seen = 0
        for key in sorted(self._buckets):
            seen += self._buckets[key]
            if seen >= wanted:
                shift = key >> (BUCKET_BITS + 1)
                top = key & (2 * BUCKETS - 1)
                return min(((top + 1) << shift) - 1, self.maximum)
        return 0


class Series:
    """A value over time as at most `points` means over `stride` steps each; the stride doubles when they are full."""

    def __init__(self, points: int = 256) -> None:
        self.points = require_int("points", points, 2)
        if self.points % 2:
            raise ShapeError(f"points is {points}; expected an even number")
        self.stride = 1
        self.means: list[float] = []
        self._sum = 0.0
        self._pending = 0

    def add(self, value: float) -> None:
        """Add the value of one step."""
        self._sum += value
        self._pending += 1
        if self._pending < self.stride:
            return
        self.means.append(self._sum / self.stride)
        self._sum, self._pending = 0.0, 0
        if len(self.means) == self.points:
            self.means = [(first + second) / 2 for first, second in zip(self.means[::2], self.means[1::2], strict=True)]
            self.stride *= 2

    def values(self) -> list[float]:
        """Return the means so far, the unfinished last one included."""
        rest = [self._sum / self._pending] if self._pending else []
        return self.means + rest


class Metrics:
    """Statistics of a serving run: blocks, state slots, fragmentation, queue, prefix reuse, and time in the index.

    Call `observe` once a step, after the commit and before finished runs are removed, when the cache holds everything
    that the step needed.

    Attributes
    ----------
    steps : int
        Steps observed.
    utilization, fragmentation : Series
        Share of the blocks in use, and share of their slots without a token.
    states : Series
        Share of the state slots that sequences or the prefix cache hold; 0 for a cache without states.
    states_peak : int
        Most state slots held in a step.
    running, waiting : Series
        Number of sequences.
    prefix_query, prefix_hit : Series
        Prompt tokens of the requests first admitted in a step, and those of them that were cached.
    evicted : Series
        Blocks evicted in a step.
    evicted_blocks : int
        Blocks evicted so far.
    index_ns : Histogram
        Time in the cache, `Step.index_ns`; the caller adds it.
    tiers : TierSource or None
        Tiers of the cache.
    """

    def __init__(self, tiers: TierSource | None = None) -> None:
        self.tiers = tiers
        self.steps = 0
        self.utilization = Series()
        self.fragmentation = Series()
        self.states = Series()
        self.states_peak = 0
        self.running = Series()
        self.waiting = Series()
        self.prefix_query = Series()
        self.prefix_hit = Series()
        self.evicted = Series()
        self.evicted_blocks = 0
        self.index_ns = Histogram()
        self.utilization_peak = 0.0
        self._utilization_sum = 0.0
        self._fragmentation_sum = 0.0
        self._query_tokens = self._hit_tokens = 0

    def observe(self, stats: CacheStats, running: int, waiting: int, reuse: Reuse) -> None:
        """Add one step; the counts of `reuse` are totals since the beginning of the run."""
        used, waste = stats.utilization, stats.fragmentation
        self.steps += 1
        self.utilization.add(used)
        self.fragmentation.add(waste)
        held = stats.num_states - stats.num_free_states
        self.states.add(held / stats.num_states if held else 0.0)
        self.states_peak = max(self.states_peak, held)
        self.running.add(running)
        self.waiting.add(waiting)
        self.prefix_query.add(reuse.prefix_query_tokens - self._query_tokens)
        self.prefix_hit.add(reuse.prefix_hit_tokens - self._hit_tokens)
        self._query_tokens, self._hit_tokens = reuse.prefix_query_tokens, reuse.prefix_hit_tokens
        self.evicted.add(stats.num_evicted_blocks - self.evicted_blocks)
        self.evicted_blocks = stats.num_evicted_blocks
        self._utilization_sum += used
        self._fragmentation_sum += waste
        self.utilization_peak = max(self.utilization_peak, used)

    @property
    def utilization_mean(self) -> float:
        """Mean over the steps of the share of blocks in use; 0 before the first step."""
        return self._utilization_sum / self.steps if self.steps else 0.0

    @property
    def fragmentation_mean(self) -> float:
        """Mean over the steps of the share of slots in held blocks without a token; 0 before the first step."""
        return self._fragmentation_sum / self.steps if self.steps else 0.0

    def prefix_hit_rates(self) -> list[float | None]:
        """Return the share of prompt tokens reused at each point of the series; None without a first admission."""
        queries, hits = self.prefix_query.values(), self.prefix_hit.values()
        return [hit / query if query else None for query, hit in zip(queries, hits, strict=True)]
