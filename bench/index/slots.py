"""Calls of a slot allocator with their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SlotCalls:
    """An allocator with SlotAllocator's `extend`, `decode` and `free`, and the sequences that it serves.

    The sequences begin with `counts` tokens each. `convert` turns an int64 array into the allocator's input; it is
    called once, so that it is not timed.
    """

    def __init__(self, allocator: Any, counts: NDArray[np.int64], convert: Callable[[Any], Any] = np.array) -> None:
        self.allocator = allocator
        self.prefix_lens = convert(np.zeros_like(counts))
        self.seq_lens = convert(counts.copy())
        self.slots = self.last_slots = convert(np.full_like(counts, -1))

    def extend(self) -> None:
        self.slots = self.allocator.extend(self.prefix_lens, self.seq_lens, self.last_slots)

    def free(self) -> None:
        self.allocator.free(self.slots)

    def decode(self) -> None:
        self.slots = self.allocator.decode(self.seq_lens, self.slots)

    def grow(self) -> None:
        self.seq_lens += 1

    def begin_decode(self) -> None:
        """Fill the sequences, up to their last slots."""
        self.extend()
        self.slots = self.slots[np.cumsum(np.asarray(self.seq_lens)) - 1]
        self.grow()


def uneven(rows: int, most: int, block_size: int) -> NDArray[np.int64]:
    """Return lengths up to `most` of every remainder: a decode step opens a block in one sequence of `block_size`."""
    return most - np.arange(rows, dtype=np.int64) % block_size
