"""Report of one replay."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pagecore.serving.replay.clock import ClockReport
from pagecore.serving.replay.states import StateReport
from pagecore.serving.replay.tiered import TierReport
from pagecore.serving.replay.turns import TurnReport

__all__ = ["ReplayReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Statistics of a replay; times in the unit that ends the name, shares from 0 to 1.

    `requests_finished` counts the requests whose tokens were all computed, and `requests_refused` those that the cache
    could never hold; `first_refusal` describes the first of these. `requests_rejected` counts those that arrived while
    `max_queued` others waited; it is None without this limit. `requests_skipped` counts the rows of a CSV trace
    without prompt tokens, which are in no other count. `swaps` of the `preemptions` swapped the run out,
    and the other preempted runs were recomputed. Without a swap space `num_swap_blocks` and `swapped_blocks_peak` are
    None.

    `prefix_hit_tokens` of `prefix_query_tokens` prompt tokens were reused; a request counts at its first admission. The
    counts in blocks include only full blocks before the last token. `recovered_tokens` were found cached by preempted
    requests when they returned, and `saved_prefill_tokens` is the sum of both. `evict` is the eviction policy, and
    `evicted_blocks` the number of evicted blocks.

    Each point of a series is the mean over `steps_per_point` steps. `prefix_hit_series` is the share of prompt tokens
    reused, None for a point without a first admission. Without attention `rows_attended`, `rows_checked` and
    `max_relative_error` are None. `states` is None for a model without recurrent states, `tiers` without a
    host tier, `clock` without `prefill_rate`, and `turns` without `ReplayOptions.turns`. A turn of a conversation
    counts as a request, and its prompt is all of the conversation so far. It is not a prefix query, and what it finds
    again counts as recovered.
    """

    requests_total: int
    requests_finished: int
    requests_refused: int
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_query_blocks: int
    prefix_hit_blocks: int
    prefix_token_hit_rate: float
    prefix_block_hit_rate: float
    recovered_tokens: int
    saved_prefill_tokens: int
    evict: str
    evicted_blocks: int
    preemptions: int
    swaps: int
    steps: int
    num_blocks: int
    block_size: int
    index_us_p50: float
    index_us_p99: float
    index_us_max: float
    utilization_mean: float
    utilization_peak: float
    fragmentation_mean: float
    wall_s: float
    steps_per_point: int
    utilization_series: list[float] = field(repr=False)
    fragmentation_series: list[float] = field(repr=False)
    running_series: list[float] = field(repr=False)
    prefix_hit_series: list[float | None] = field(repr=False)
    evicted_series: list[float] = field(repr=False)
    requests_skipped: int = 0
    requests_rejected: int | None = None
    first_refusal: str | None = None
    num_swap_blocks: int | None = None
    swapped_blocks_peak: int | None = None
    rows_attended: int | None = None
    rows_checked: int | None = None
    max_relative_error: float | None = None
    states: StateReport | None = None
    tiers: TierReport | None = None
    clock: ClockReport | None = None
    turns: TurnReport | None = None
    passed: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dict of plain values, without the fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}
