"""Eviction policies for recorded traffic, and statistics of prefix reuse."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pagecore.index import check_policy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagecore.cache import Sequence

__all__ = ["NO_REUSE", "POLICIES", "Query", "Reuse", "cache_options", "query_of"]

# Numbers that one query adds to the fields of `Reuse`.
Query = tuple[int, int, int, int, int, int]

# The policies that need no value for each prefix: recorded traffic has no priorities and no ranks. "none" turns the
# prefix cache off.
NO_REUSE = "none"
POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "slru", NO_REUSE)


def cache_options(evict: str) -> dict[str, Any]:
    """Return the arguments of `PagedKVCache` for a policy.

    Raises
    ------
    UnsupportedOption
        `evict` is not one of `POLICIES`, and not "slru:SHARE".
    """
    check_policy(evict, "evict", POLICIES)
    return {"prefix_cache": False} if evict == NO_REUSE else {"eviction_policy": evict}


@dataclass(frozen=True, slots=True)
class Reuse:
    """Statistics of the prefix cache over all admissions so far.

    Every request counts once, at the commit of its first step, with what the admission before it found. A request that
    continues with the sequence of an import looks no prefix up, and does not count. Tokens that a run finds cached when
    it returns after a preemption were mostly computed by itself, and are counted separately.

    Attributes
    ----------
    prefix_query_tokens, prefix_hit_tokens : int
        Tokens of the prompts, and those of them that were reused.
    prefix_matched_tokens : int
        Tokens whose blocks were cached. More than `prefix_hit_tokens` in a cache with recurrent states, which computes
        the tokens after the deepest cached state again.
    prefix_query_blocks, prefix_hit_blocks : int
        Blocks that could be reused, which are the full blocks before the last token, and those that were.
    num_recovered_tokens : int
        Cached tokens that preempted runs did not recompute; tokens restored from a swap space are not included.
    """

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_matched_tokens: int = 0
    prefix_query_blocks: int = 0
    prefix_hit_blocks: int = 0
    num_recovered_tokens: int = 0

    @property
    def saved_prefill_tokens(self) -> int:
        """Number of tokens that were not computed because they were cached."""
        return self.prefix_hit_tokens + self.num_recovered_tokens

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompt tokens that was reused; 0 before the first admission."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        """Share of the reusable blocks that was reused; 0 if there were none."""
        return self.prefix_hit_blocks / self.prefix_query_blocks if self.prefix_query_blocks else 0.0

    def counted(self, queries: Iterable[Query]) -> Reuse:
        """Return the statistics with those of further queries."""
        return Reuse(*map(sum, zip(_values(self), *queries, strict=True)))

    def recovered(self, num_tokens: int) -> Reuse:
        """Return the statistics with cached tokens that a run finds when it is admitted again after its first step."""
        return replace(self, num_recovered_tokens=self.num_recovered_tokens + num_tokens)


def query_of(sequence: Sequence, num_tokens: int, block_size: int) -> Query:
    """Return what the query of some tokens adds, whose sequence has computed none of them."""
    found = sequence.num_cached_tokens
    return num_tokens, found, sequence.num_matched_tokens, (num_tokens - 1) // block_size, found // block_size, 0


_values = attrgetter(*(field.name for field in fields(Reuse)))
