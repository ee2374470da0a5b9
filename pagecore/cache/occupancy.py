"""What the blocks of a cache hold, read from its block tables."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pagecore.cache._prefix import PrefixCache
from pagecore.cache._sequence import Sequence
from pagecore.cache.stats import CacheStats
from pagecore.cache.swap import SwapSpace
from pagecore.index import BlockTables

Table = NDArray[np.int32]


def measure(
    tables: BlockTables,
    sequences: Iterable[Sequence],
    spaces: Iterable[SwapSpace],
    prefix: PrefixCache | None,
    *,
    num_copied_blocks: int,
    num_scrubbed_blocks: int,
    nbytes: int,
) -> CacheStats:
    """How full a cache is: its tables, its sequences, the spaces that they are swapped out to, and what is cached."""
    pools, block_size = tables.pools, tables.block_sizes[0]
    resident: list[Sequence] = []
    swapped: list[Sequence] = []
    for sequence in sequences:
        (swapped if sequence.is_swapped else resident).append(sequence)
    evictable = 0 if prefix is None else sum(prefix.evictable())
    used = sum(pool.num_used for pool in pools) - evictable
    held = used * block_size
    wasted = sum(wasted_slots(tables.table(group), resident, block_size) for group in range(len(pools)))
    return CacheStats(
        num_sequences=len(resident) + len(swapped),
        num_tokens=sum(sequence.num_computed_tokens for sequence in resident),
        num_blocks=sum(pool.num_blocks - 1 for pool in pools),
        num_free_blocks=sum(pool.num_free for pool in pools),
        num_used_blocks=used,
        num_evictable_blocks=evictable,
        fragmentation=wasted / held if held else 0.0,
        num_copied_blocks=num_copied_blocks,
        num_scrubbed_blocks=num_scrubbed_blocks,
        nbytes=nbytes,
        num_swapped_sequences=len(swapped),
        num_swapped_tokens=sum(sequence.num_computed_tokens for sequence in swapped),
        num_swapped_blocks=sum(space.num_used_blocks for space in spaces),
        **({} if prefix is None else prefix.figures()),
    )


def wasted_slots(table: Table, sequences: Iterable[Sequence], block_size: int) -> int:
    """Slots in held blocks that hold no valid token; a shared block counts once, as its fullest holder sees it."""
    waste: dict[int, int] = {}
    for sequence in sequences:
        first, valid = divmod(sequence.num_computed_tokens, block_size)
        for block in table[sequence.row, first : -(-sequence.capacity // block_size)].tolist():
            if block:
                waste[block] = min(waste.get(block, block_size), block_size - valid)
            valid = 0
    return sum(waste.values())
