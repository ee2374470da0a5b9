"""Plain implementations of the index: free lists in Python, and block tables in NumPy.

They check nothing and count no references unless stated, which favours them.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Slots = NDArray[np.int64]


class ListPool:
    """Free list in a Python list: last in, first out."""

    name = "Python list"

    def __init__(self, num_blocks: int) -> None:
        self.free_ids = list(range(num_blocks - 1, 0, -1))

    def allocate(self, n: int) -> list[int]:
        taken = self.free_ids[-n:]
        del self.free_ids[-n:]
        taken.reverse()
        return taken

    def free(self, blocks: list[int]) -> None:
        self.free_ids.extend(blocks)


class DequePool:
    """Free list in a deque: first in, first out."""

    name = "Python deque"

    def __init__(self, num_blocks: int) -> None:
        self.free_ids = deque(range(1, num_blocks))

    def allocate(self, n: int) -> list[int]:
        take = self.free_ids.popleft
        return [take() for _ in range(n)]

    def free(self, blocks: list[int]) -> None:
        self.free_ids.extend(blocks)


class HeapPool:
    """Free list in a heap: lowest id first."""

    name = "Python heapq"

    def __init__(self, num_blocks: int) -> None:
        self.free_ids = list(range(1, num_blocks))

    def allocate(self, n: int) -> list[int]:
        return [heapq.heappop(self.free_ids) for _ in range(n)]

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            heapq.heappush(self.free_ids, block)


class NumpyPool:
    """Free list in a NumPy array, last in, first out; rejects blocks that are not allocated."""

    name = "NumPy stack, checked"

    def __init__(self, num_blocks: int) -> None:
        self.stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self.held = np.zeros(num_blocks, bool)
        self.top = num_blocks - 1

    def allocate(self, n: int) -> Ids:
        taken = self.stack[self.top - n : self.top][::-1].copy()
        self.top -= n
        self.held[taken] = True
        return taken

    def free(self, blocks: Ids) -> None:
        if not self.held[blocks].all():
            raise ValueError("double free: a block is free already")
        self.held[blocks] = False
        self.stack[self.top : self.top + len(blocks)] = blocks
        self.top += len(blocks)


class NumpyTables:
    """Block tables in NumPy, vectorised over rows."""

    name = "NumPy tables"

    def __init__(self, pool: NumpyPool, block_size: int, max_sequences: int, max_blocks: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.table = np.zeros((max_sequences, max_blocks), np.int32)
        self.lengths = np.zeros(max_sequences, np.int32)

    def extend(self, rows: Ids, counts: Ids, out: Slots) -> Slots:
        """Return the slots of `counts[i]` more tokens of each row, row after row."""
        size = self.block_size
        starts = self.lengths[rows]
        ends = starts + counts
        first, last = -(-starts // size), -(-ends // size)
        new = last - first
        total = int(new.sum())
        if total:
            which = np.repeat(np.arange(len(rows)), new)
            column = np.arange(total) - np.repeat(np.cumsum(new) - new, new) + first[which]
            self.table[rows[which], column] = self.pool.allocate(total)
        tokens = int(counts.sum())
        which = np.repeat(np.arange(len(rows)), counts)
        position = np.arange(tokens) - np.repeat(np.cumsum(counts) - counts - starts, counts)
        np.add(self.table[rows[which], position // size] * np.int64(size), position % size, out=out[:tokens])
        self.lengths[rows] = ends
        return out[:tokens]

    def remove(self, row: int) -> None:
        blocks = -(-int(self.lengths[row]) // self.block_size)
        self.pool.free(self.table[row, :blocks][::-1])
        self.lengths[row] = 0


class NumpySlots:
    """Slots for engines that keep their own tables, vectorised over the batch."""

    name = "NumPy slots"

    def __init__(self, pool: NumpyPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size

    def extend(self, prefix_lens: Slots, seq_lens: Slots, last_slots: Slots) -> Slots:
        size = self.block_size
        counts = seq_lens - prefix_lens
        first = -(-prefix_lens // size)
        new = -(-seq_lens // size) - first
        blocks = self.pool.allocate(int(new.sum())).astype(np.int64)
        which = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - prefix_lens, counts)
        fresh = position // size + np.repeat(np.cumsum(new) - new - first, counts)
        slots: Slots = last_slots[which] + 1 + position - prefix_lens[which]
        opened = position >= (first * size)[which]
        slots[opened] = blocks[fresh[opened]] * size + position[opened] % size
        return slots

    def decode(self, seq_lens: Slots, last_slots: Slots) -> Slots:
        slots = last_slots + 1
        opens = np.flatnonzero(seq_lens % self.block_size == 1)
        slots[opens] = self.pool.allocate(len(opens)).astype(np.int64) * self.block_size
        return slots

    def free(self, slots: Slots) -> None:
        self.pool.free(np.unique(slots // self.block_size))
