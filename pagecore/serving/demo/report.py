"""Report of one run of the demo."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.serving.demo.verify import Verdict
from pagecore.tiers.host.methods.records import HostStats

__all__ = ["DemoReport", "StateFigures"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFigures:
    """Statistics of the recurrent states of a run of the demo.

    At most `peak` of the `num_states` slots were held at once; the null slot is not counted. `queries` are the requests
    at their first admission, and `hits` of them began with a cached state. Steps kept `checkpoints` states, and the
    prefix cache evicted `evicted` of these.
    """

    num_states: int
    peak: int
    hits: int
    queries: int
    checkpoints: int
    evicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Statistics and verdict of a run of the demo; times in seconds, shares from 0 to 1.

    `swaps` of the `preemptions` swapped the run out, and the other preempted runs were recomputed; `swap_nbytes` is
    the size of the swap space. `static_nbytes` is the memory that static caches of `max_length` tokens would need for
    `running_peak` sequences. `follow_ups` counts the turns that continued a chat: of their `history_tokens`,
    `history_hit_tokens` were reused. The other statistics of reuse are those of `ReplayReport`. `states` is None for
    a model without recurrent layers, and `host` without a host tier.
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
    states: StateFigures | None = None
    host: HostStats | None = None
