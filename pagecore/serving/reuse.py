"""What a run asks of the prefix cache, and how much of it the cache had."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagecore.errors import UnsupportedOption

if TYPE_CHECKING:
    from pagecore.serving.request import Run

__all__ = ["NO_REUSE", "POLICIES", "Reuse", "cache_options", "check_policy"]

# What recorded traffic can choose among: it knows of no priorities and no ranks. "none" is no prefix cache at all.
NO_REUSE = "none"
POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "slru", NO_REUSE)


def check_policy(evict: str) -> None:
    """Refuse a policy that recorded traffic cannot have."""
    if not isinstance(evict, str) or evict not in POLICIES:
        raise UnsupportedOption(f"evict is {evict!r}; use one of {', '.join(POLICIES)}")


def cache_options(evict: str) -> dict[str, Any]:
    """What a `PagedKVCache` is told for a policy, or for "none".

    Raises
    ------
    UnsupportedOption
        An unknown policy.
    """
    check_policy(evict)
    return {"prefix_cache": False} if evict == NO_REUSE else {"eviction_policy": evict}


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens that admissions found in the prefix cache, so far.

    Every request counts once, at its first admission. Tokens that a preempted run finds when it comes back are mostly
    its own work, and are counted apart.

    Attributes
    ----------
    prefix_query_tokens, prefix_hit_tokens : int
        Tokens of the prompts, and how many of them were reused.
    prefix_query_blocks, prefix_hit_blocks : int
        Blocks that could be reused, the whole ones below the last token, and those that were.
    num_recovered_tokens : int
        Tokens that preempted runs found again and did not compute twice; those of a swap space are not among them.
    """

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_blocks: int = 0
    prefix_hit_blocks: int = 0
    num_recovered_tokens: int = 0

    @property
    def saved_prefill_tokens(self) -> int:
        """Tokens that were not computed because they were there."""
        return self.prefix_hit_tokens + self.num_recovered_tokens

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompts' tokens that was reused; 0 where nothing was asked for."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        """Share of the blocks that could be reused that was; 0 where there was none."""
        return self.prefix_hit_blocks / self.prefix_query_blocks if self.prefix_query_blocks else 0.0

    def counted(self, run: Run, block_size: int) -> Reuse:
        """Return the figures with an admission of `run`, not from a swap space, that has computed nothing yet."""
        found = run.sequence.num_cached_tokens
        if run.num_preemptions:
            return replace(self, num_recovered_tokens=self.num_recovered_tokens + found)
        return replace(
            self,
            prefix_query_tokens=self.prefix_query_tokens + len(run.tokens),
            prefix_hit_tokens=self.prefix_hit_tokens + found,
            prefix_query_blocks=self.prefix_query_blocks + (len(run.tokens) - 1) // block_size,
            prefix_hit_blocks=self.prefix_hit_blocks + found // block_size,
        )
