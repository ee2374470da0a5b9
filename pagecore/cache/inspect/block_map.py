"""Block map: the holders of each block of a group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.inspect._block_map import mark_blocks
from pagecore.cache.sequences._sequences import Sequence
from pagecore.index import BlockTables
from pagecore.storage.checks import ceil_div

Int32s = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class BlockMap:
    """The holders of every block of one group at one moment; the arrays are copies and do not change with the cache.

    Attributes
    ----------
    group, block_size : int
    sequences : tuple
        Ids of the cache's sequences in the order in which they were added, including those without a block.
    owner : numpy.ndarray
        int32 [num_blocks]: index in `sequences` of the first sequence that holds the block; -1 for blocks that no
        sequence holds, and for the null block.
    holders : numpy.ndarray
        int32 [num_blocks]: number of sequences that hold the block. Several holders copy it before they write to it.
    cached : numpy.ndarray
        bool [num_blocks]: True if the prefix cache holds the block. A block that neither the prefix cache nor a
        sequence holds is free.
    num_tokens : numpy.ndarray
        int32 [num_blocks]: slots of the block with a computed token; for a shared block, those of its fullest holder.
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
    """Return the map of a group; the prefix cache holds the blocks `known`."""
    listed = list(sequences)
    block_size = tables.block_sizes[group]
    # A sequence that is swapped out has no row and holds no block.
    sizes = [ceil_div(tables.capacity(sequence.row), block_size) if sequence.row >= 0 else 0 for sequence in listed]
    holders = tables.pools[group].ref_counts()
    cached = np.zeros(holders.shape, np.bool_)
    cached.put(known, True)  # where an allocation fails, NumPy 2.4 crashes in assignments by arrays other than int64
    holders -= cached
    owner, num_tokens = np.full(holders.shape, -1, np.int32), np.zeros(holders.shape, np.int32)
    mark_blocks(tables.table(group), listed, sizes, block_size, owner, num_tokens)
    # Holes wrote the entries of the null block, which has no holder.
    owner[0], num_tokens[0] = -1, 0
    names = tuple(sequence.id for sequence in listed)
    return BlockMap(group, block_size, names, owner, holders, cached, num_tokens)


def map_contents(group: int, first_group: int, tables: BlockTables, sequences: Iterable[Sequence]) -> BlockMap:
    """Return the map of a cross-attention group; the holders of a block are the sequences of its encoder output."""
    listed = list(sequences)
    own = group - first_group
    block_size = tables.block_sizes[own]
    shape = tables.pools[own].num_blocks
    owner, holders = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    num_tokens = np.zeros(shape, np.int32)
    for number, sequence in enumerate(listed):
        row = sequence.cross_row
        if row < 0:
            continue
        blocks = tables.blocks(row, own).astype(np.int64)
        owner[blocks] = np.where(holders[blocks] == 0, number, owner[blocks])
        holders[blocks] += 1
        num_tokens[blocks] = np.clip(tables.length(row) - np.arange(len(blocks)) * block_size, 0, block_size)
    names = tuple(sequence.id for sequence in listed)
    return BlockMap(group, block_size, names, owner, holders, np.zeros(shape, np.bool_), num_tokens)
