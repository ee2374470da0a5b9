"""Statistics of a paged cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """Statistics of a cache at one moment; null blocks are not counted.

    Attributes
    ----------
    num_sequences : int
        Sequences, including those that are swapped out.
    num_tokens : int
        Computed tokens, summed over the sequences that are not swapped out.
    num_blocks : int
        Blocks of all groups; each is free, used or evictable.
    num_free_blocks, num_used_blocks, num_evictable_blocks : int
        Blocks without a holder; blocks that sequences use; and blocks that only the prefix cache holds.
    fragmentation : float
        Fraction of the slots in used blocks without a valid token; a block that several sequences share counts once.
    num_copied_blocks : int
        Blocks copied on write since the cache was made.
    nbytes : int
        Bytes of all planes in all pools; 0 for a cache without bytes.
    num_swapped_sequences, num_swapped_tokens : int
        Sequences in swap spaces, and their computed tokens.
    num_swapped_blocks : int
        Blocks of swap spaces that hold them.
    num_cached_blocks : int
        Blocks that the prefix cache holds, including those that sequences use too.
    num_evicted_blocks : int
        Blocks that the prefix cache has evicted since the cache was made.
    prefix_hits, prefix_misses : int
        Sequences added by `add_sequence` that reused a cached prefix, and those that did not; tentative ones count
        once their first step is prepared, or they are copied.
    prefix_query_tokens, prefix_hit_tokens : int
        Tokens of those sequences, and the number of reused ones.
    prefix_shared_tokens : int
        Tokens of those sequences whose blocks were shared. More than `prefix_hit_tokens` in a cache with states, which
        computes the tokens after the deepest cached state again.
    num_states, num_free_states, num_cached_states, num_evicted_states : int
        State slots; those without a holder; those that the prefix cache holds, including those that sequences use too;
        and states evicted since the cache was made. 0 without layers that keep states.
    num_checkpoints, num_free_checkpoints : int
        Slots of quantised checkpoints, and those without a holder: cached states are among the others. 0 if checkpoints
        have slots of states.
    num_scrubbed_blocks : int
        Blocks that steps have zeroed since the cache was made, because another namespace had used them; 0 without
        `scrub`.
    """

    num_sequences: int
    num_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    fragmentation: float
    num_copied_blocks: int
    nbytes: int
    num_swapped_sequences: int = 0
    num_swapped_tokens: int = 0
    num_swapped_blocks: int = 0
    num_evictable_blocks: int = 0
    num_cached_blocks: int = 0
    num_evicted_blocks: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_scrubbed_blocks: int = 0
    prefix_shared_tokens: int = 0
    num_states: int = 0
    num_free_states: int = 0
    num_cached_states: int = 0
    num_evicted_states: int = 0
    num_checkpoints: int = 0
    num_free_checkpoints: int = 0

    @property
    def utilization(self) -> float:
        """Fraction of the blocks that sequences use; 0 in a cache without blocks."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0
