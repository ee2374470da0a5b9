"""Report of one run of the demo."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.serving.demo.verify import Verdict

__all__ = ["DemoReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What was served, in what memory, and whether it was right; times in seconds, shares from 0 to 1.

    `swaps` of the preempted runs were swapped out, the others computed again; `swap_nbytes` is the memory for that.
    `static_nbytes` is what caches of `max_length` would take for as many sequences as ran at once at the peak.
    `follow_ups` turns went on with a chat; of `history_tokens` that had been said before them, `history_hit_tokens`
    were reused. The other figures of reuse are those of `ReplayReport`.
    """

    requests: int
    sequences: int
    prompt_tokens: int
    generated_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_token_hit_rate: float
    recovered_tokens: int
    saved_prefill_tokens: int
    evict: str
    evicted_blocks: int
    follow_ups: int
    history_tokens: int
    history_hit_tokens: int
    steps: int
    num_blocks: int
    num_groups: int
    block_size: int
    utilization_peak: float
    utilization_mean: float
    fragmentation_mean: float
    copied_blocks: int
    preemptions: int
    swaps: int
    forks: int
    running_peak: int
    max_length: int
    nbytes: int
    swap_nbytes: int
    static_nbytes: int
    serve_s: float
    verify_s: float
    verdict: Verdict
