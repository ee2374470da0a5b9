"""Report of one replay."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["ReplayReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay was like; times in the units that the names end in, shares from 0 to 1.

    `requests_finished` counts requests whose every token was computed; `requests_refused` those that the cache could
    never hold, of which `first_refusal` tells one. `swaps` of the preemptions were swapped out, the others computed
    again; without a swap space `num_swap_blocks` and `swapped_blocks_peak` are None.

    Of `prefix_query_tokens` of the prompts, `prefix_hit_tokens` were reused, counted when a request is admitted first;
    in blocks, of those that are whole and below the last token. `recovered_tokens` are what preempted requests found
    again, `saved_prefill_tokens` both. `evict` is the policy by which `evicted_blocks` were given up.

    The series hold means of `steps_per_point` steps each, `prefix_hit_series` the share of the tokens that was reused
    in them, None where no request was admitted first. Without attention, `rows_attended`, `rows_checked` and
    `max_relative_error` are None.
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
    first_refusal: str | None = None
    num_swap_blocks: int | None = None
    swapped_blocks_peak: int | None = None
    rows_attended: int | None = None
    rows_checked: int | None = None
    max_relative_error: float | None = None
    passed: bool = True

    def as_json(self) -> dict[str, Any]:
        """The report as plain values; keys that do not apply are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}
