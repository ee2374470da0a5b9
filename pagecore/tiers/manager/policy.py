"""Decisions of a load: the longest prefix that host and stores make up, and its division into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pagecore.index import RadixTree
from pagecore.tiers.manager.port import Flags, Positions

__all__ = ["PrefixPlanner", "Wanted", "chunks_of"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A reusable prefix and the entries that it needs.

    Attributes
    ----------
    num_tokens : int
        Length of the prefix, in whole blocks.
    positions : tuple of ndarray
        Positions of the entries that each lane needs, ascending; a window needs only its end, and states one entry.
    """

    num_tokens: int
    positions: tuple[Positions, ...]


class PrefixPlanner:
    """Finds the longest reusable prefix of entries that lie in several places.

    The rules of windows, sinks, chunks and states are those of the prefix tree: the entries are inserted into a tree
    with the same components, for one prompt, and the tree is asked.

    Parameters
    ----------
    tree : RadixTree
        The tree of the host.
    tree_lanes : sequence of int
        The group of each lane of the tree.
    """

    def __init__(self, tree: RadixTree, tree_lanes: Sequence[int]) -> None:
        self.block_size = tree.block_size
        self.has_states = "state" in tree.components
        self.num_lanes = len(tree_lanes) + self.has_states
        self._order = tuple(tree_lanes)
        self._num_full = len(tree_lanes) - len(tree.windows)
        self._windows = tree.windows
        self._chunks = tree.chunks
        self._sinks = tree.sinks
        self._interval = tree.state_interval

    @property
    def full_lanes(self) -> tuple[int, ...]:
        """The groups without a window."""
        return self._order[: self._num_full]

    @property
    def has_full_lanes(self) -> bool:
        """True if a lane needs the entries of all blocks of a prefix; windows and states need those of its end."""
        return self._num_full > 0

    def longest(self, tokens: NDArray[np.int32], there: Sequence[Flags], max_tokens: int) -> Wanted:
        """Return the longest reusable prefix of up to `max_tokens` tokens.

        Parameters
        ----------
        tokens : ndarray of int32
        there : sequence of ndarray of bool
            ``[num_blocks]`` for each lane: the entry of a whole block of `tokens` is in the host or in a store.
        max_tokens : int
        """
        size = self.block_size
        count = self.num_connected(there, min(max_tokens, len(tokens)) // size)
        if not count:
            return Wanted(0, (np.empty(0, np.int64),) * self.num_lanes)
        numbers = np.arange(1, count + 1, dtype=np.int32)
        blocks = [np.where(there[lane][:count], numbers, np.int32(0)) for lane in self._order]
        states = None
        if self.has_states:
            states = [(int(number) * size, int(number)) for number in numbers[there[-1][:count]]]
        tree = self._new_tree()
        prefix = tokens[: count * size]
        tree.insert(prefix, blocks[0] if len(blocks) == 1 else blocks, states=states)
        match = tree.match(prefix)
        found = match.blocks if isinstance(match.blocks, tuple) else (match.blocks,)
        positions = [np.empty(0, np.int64)] * self.num_lanes
        for lane, ids in zip(self._order, found, strict=True):
            positions[lane] = np.flatnonzero(ids).astype(np.int64)
        if match.state is not None:
            positions[-1] = np.array([match.num_tokens // size - 1], np.int64)
        return Wanted(match.num_tokens, tuple(positions))

    def num_connected(self, there: Sequence[Flags], count: int) -> int:
        """Return the number of blocks from the start for which every group without a window has its entry."""
        for lane in self._order[: self._num_full]:
            holes = np.flatnonzero(~there[lane][:count])
            if len(holes):
                count = int(holes[0])
        return count

    def _new_tree(self) -> RadixTree:
        return RadixTree(
            self.block_size,
            full=self._num_full,
            windows=self._windows,
            chunks=self._chunks,
            sinks=self._sinks,
            states=self.has_states,
            state_interval=self._interval,
        )


def chunks_of(positions: Sequence[Positions], payload_bytes: Sequence[int], chunk_bytes: int) -> list[tuple[int, int]]:
    """Divide the entries of a load into ranges of positions, each with about `chunk_bytes` bytes.

    Returns
    -------
    list of (int, int)
        First position and end of each range, ascending and without gaps; the first begins at the first entry.
    """
    begins = [int(lane[0]) for lane in positions if len(lane)]
    if not begins:
        return []
    begin = min(begins)
    end = max(int(lane[-1]) for lane in positions if len(lane)) + 1
    weights = np.zeros(end - begin, np.int64)
    for lane, nbytes in zip(positions, payload_bytes, strict=True):
        weights[lane - begin] += nbytes
    # The number of the chunk in which each position begins.
    numbers = (np.cumsum(weights) - weights) // max(chunk_bytes, 1)
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), end - begin]
    return [(begin + low, begin + high) for low, high in pairwise(cuts)]
