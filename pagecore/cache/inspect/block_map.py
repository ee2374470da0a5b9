"""Who holds which block: a group's block tables, seen from the blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.cache._sequence import Sequence
from pagecore.cache.inspect._block_map import mark_blocks
from pagecore.index import BlockTables

Int32s = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class BlockMap:
    """Every block of one group at one moment; the arrays are the caller's own and follow the cache no longer.

    Attributes
    ----------
    group, block_size : int
    sequences : tuple
        Ids of the cache's sequences in order of arrival, those that hold no block included.
    owner : numpy.ndarray
        int32 [num_blocks]: the first of `sequences`, by its place there, that holds the block; -1 where none does, and
        for the null block.
    holders : numpy.ndarray
        int32 [num_blocks]: sequences that hold the block; more than 1 share it, and copy it before they write.
    cached : numpy.ndarray
        bool [num_blocks]: whether the prefix cache holds the block too. What neither it nor a sequence holds is free.
    num_tokens : numpy.ndarray
        int32 [num_blocks]: its slots that hold a computed token; a shared block's are those of its fullest holder.
    """

    group: int
    block_size: int
    sequences: tuple[object, ...]
    owner: Int32s
    holders: Int32s
    cached: NDArray[np.bool_]
    num_tokens: Int32s

    def __repr__(self) -> str:
        held, shared = np.count_nonzero(self.holders), np.count_nonzero(self.holders > 1)
        kept = np.count_nonzero(self.cached & (self.holders == 0))
        return (
            f"BlockMap(group={self.group}, {held} of {len(self.holders) - 1} blocks held, {shared} of them shared, "
            f"{f'{kept} more cached, ' if kept else ''}{len(self.sequences)} sequences)"
        )


def map_blocks(group: int, tables: BlockTables, sequences: Iterable[Sequence], known: Int32s) -> BlockMap:
    """The map of a group of the tables, where the prefix cache holds the blocks `known`.

    `sequences` are those of the cache in order of arrival.
    """
    listed = list(sequences)
    block_size = tables.block_sizes[group]
    # A sequence that has no row, because it is swapped out, holds no block.
    sizes = [-(-tables.capacity(sequence.row) // block_size) if sequence.row >= 0 else 0 for sequence in listed]
    holders = tables.pools[group].ref_counts()
    cached = np.zeros(holders.shape, np.bool_)
    cached[known] = True
    holders -= cached
    owner, num_tokens = np.full(holders.shape, -1, np.int32), np.zeros(holders.shape, np.int32)
    mark_blocks(tables.table(group), listed, sizes, block_size, owner, num_tokens)
    # The holes that windows leave are entries of the null block, which nobody holds.
    owner[0], num_tokens[0] = -1, 0
    names = tuple(sequence.id for sequence in listed)
    return BlockMap(group, block_size, names, owner, holders, cached, num_tokens)
