"""Statistics of a run of any length in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagecore.errors import ShapeError
from pagecore.storage.checks import as_float, require_int

if TYPE_CHECKING:
    from pagecore.cache import CacheStats
    from pagecore.serving.reuse import Reuse

__all__ = ["Histogram", "Metrics", "Series"]

# Values below 128 are exact; above, each octave has 128 buckets, so a percentile is off by less than 1 in 128.
BUCKET_BITS = 7
BUCKETS = 1 << BUCKET_BITS


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
            A value that is not an integer, or is negative.
        """
        value = require_int("value", value, 0, max=None)
        shift = max(value.bit_length() - BUCKET_BITS - 1, 0)
        key = (shift << (BUCKET_BITS + 1)) + (value >> shift)
        self._buckets[key] = self._buckets.get(key, 0) + 1
        self.count += 1
        self.maximum = max(self.maximum, value)

    def percentile(self, percent: float) -> int:
        """The least value that `percent` of those counted do not exceed (its bucket's upper end); 0 when none was.

        Raises
        ------
        ShapeError
            A `percent` that is not a number from 0 to 100.
        """
        percent = as_float("percent", percent)
        if not 0 <= percent <= 100:
            raise ShapeError(f"percent is {percent}; it must be between 0 and 100")
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
    """A value over time as at most `points` means of equally many steps each; the stride doubles as time goes on."""

    def __init__(self, points: int = 256) -> None:
        self.points = require_int("points", points, 2)
        if self.points % 2:
            raise ShapeError(f"points is {points}; give an even number")
        self.stride = 1
        self.means: list[float] = []
        self._sum = 0.0
        self._pending = 0

    def add(self, value: float) -> None:
        """Take the value of one more step."""
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
        """The means so far, the unfinished last one included."""
        rest = [self._sum / self._pending] if self._pending else []
        return self.means + rest


class Metrics:
    """What a serving run was like: how full the pool was, how much of it was waste, how long the index took.

    `observe` takes the cache's statistics once a step, after commit and before the finished are removed, when
    everything that the step needed is held.

    Attributes
    ----------
    utilization, fragmentation : Series
        Shares of the blocks in use, and of their slots without a token.
    running, waiting : Series
        Sequences.
    prefix_query, prefix_hit : Series
        Tokens of the requests admitted first in a step, and of those the ones that the prefix cache had.
    evicted : Series
        Blocks that it gave up in a step; `evicted_blocks` so far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.utilization = Series()
        self.fragmentation = Series()
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
        """Take in one step; what is in `reuse` is counted from the beginning of the run."""
        used, waste = stats.utilization, stats.fragmentation
        self.steps += 1
        self.utilization.add(used)
        self.fragmentation.add(waste)
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
        """Mean over the steps of the share of blocks in use; 0 when there was no step."""
        return self._utilization_sum / self.steps if self.steps else 0.0

    @property
    def fragmentation_mean(self) -> float:
        """Mean over the steps of the share of slots in held blocks that hold no token; 0 when there was no step."""
        return self._fragmentation_sum / self.steps if self.steps else 0.0

    def prefix_hit_rates(self) -> list[float | None]:
        """Share of the tokens that was reused, for each span of the series; None where nobody was admitted first."""
        asked, found = self.prefix_query.values(), self.prefix_hit.values()
        return [hit / query if query else None for query, hit in zip(asked, found, strict=True)]
