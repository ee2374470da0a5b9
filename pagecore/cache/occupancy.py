"""What the blocks of a group hold, read from its block table."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pagecore.cache._sequence import Sequence
from pagecore.errors import UnsupportedOption

Table = NDArray[np.int32]


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


def check_window(table: Table, row: int, length: int, window: int, block_size: int) -> None:
    """The next token of a sequence cut to `length` must still find every key of its window."""
    entries = table[row, : -(-length // block_size)]
    holes = int(np.argmax(entries != 0)) if entries.any() else entries.size
    released = holes * block_size
    if released > max(0, length - (window - 1)):
        raise UnsupportedOption(
            f"length is {length}, but the keys before {released} have left the window of {window} and were released; "
            "truncate to 0 and compute the sequence again"
        )
