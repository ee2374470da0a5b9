"""Results of a what-if."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pagecore.serving.whatif.lru import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Hits of one policy and block size over the size of the cache; lists have an entry for each size.

    `method` is "exact" (stack distances), "sampled" or "simulated". `memory` is in bytes, `blocks` counts the blocks
    that can be used, or the state slots of a model whose layers all keep states. `hit_tokens` of `query_tokens` prompt
    tokens were found; requests that a cache cannot hold, `refused`, are in neither. `saved_seconds` is the time to
    compute `hit_tokens`.
    """

    policy: str
    block_size: int
    method: Literal["exact", "sampled", "simulated"]
    memory: list[int]
    blocks: list[int]
    hit_tokens: list[int]
    query_tokens: list[int]
    hit_rate: list[float]
    saved_seconds: list[float]
    refused: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHits:
    """Tokens that are found in one tier and in no faster one; `hit_rate` is their share of the prompt tokens."""

    medium: str
    memory: int
    hit_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Hits of a trace for sizes, block sizes, policies and tiers.

    `unbounded_hit_rate` is the hit rate of a cache that evicts nothing, `unbounded_memory` the bytes of all distinct
    blocks and of all states, and `longest_request` the bytes of the longest prompt and its state; they and the timeline
    are of the first block size. A sampled what-if has no timeline. `num_skipped` counts the rows of a CSV trace without
    prompt tokens, which are not among the requests.
    """

    trace: str
    num_requests: int
    prompt_tokens: int
    bytes_per_token: int
    prefill_rate: float
    unbounded_hit_rate: float
    unbounded_memory: int
    longest_request: int
    curves: list[Curve]
    tiers: list[TierHits] = field(default_factory=list)
    timeline: Timeline | None = None
    timeline_memory: list[int] = field(default_factory=list)
    num_skipped: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the results as a dict of plain values."""
        return asdict(self)
