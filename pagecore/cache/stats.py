"""How full a cache is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """A moment of a cache; null blocks are not counted.

    Attributes
    ----------
    num_sequences : int
        Those that are swapped out among them.
    num_tokens : int
        Computed tokens, summed over the sequences that are not swapped out.
    num_blocks, num_free_blocks, num_used_blocks : int
        Blocks that can be had, are free, are held; summed over groups.
    fragmentation : float
        Share of the slots in held blocks that holds no valid token; a block that several sequences share counts once.
    num_copied_blocks : int
        Blocks copied on write since the cache was made.
    nbytes : int
        Bytes of key and value in all pools; 0 where the cache holds none.
    num_swapped_sequences, num_swapped_tokens : int
        Sequences in swap spaces, and their computed tokens.
    num_swapped_blocks : int
        Blocks of swap spaces that hold them, summed over groups.
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

    @property
    def utilization(self) -> float:
        """Share of the blocks that is held."""
        return self.num_used_blocks / self.num_blocks
