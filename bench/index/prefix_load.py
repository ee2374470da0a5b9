"""Contents of the timed prefix caches: sequences of 1,024 tokens in groups that share the first 512."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.harness.machine import last_level_cache

LENGTH, SHARED, GROUP = 1024, 512, 100
VOCABULARY = 100_000
# Keys that match no sequence; enough that consecutive samples have different keys.
MADE_UP = 2048


@dataclass(slots=True)
class Load:
    """Sequences, their blocks, and keys that are found halfway or not at all.

    Sequence i belongs to group ``i % groups``. Blocks are numbered from 1: first those of every group's shared half,
    then those of every sequence's own half.

    Attributes
    ----------
    keys : dict of int32 arrays
        "hit" [num_sequences, LENGTH]: the sequences; "half" [made_up, LENGTH]: a group's shared half, then tokens that
        no sequence has there; "miss" [made_up, LENGTH]: beginnings that no sequence has.
    blocks : int32 array
        [num_sequences, LENGTH // block_size].
    """

    num_sequences: int
    block_size: int
    group: int = GROUP
    made_up: int = MADE_UP
    keys: dict[str, NDArray[np.int32]] = field(init=False)
    blocks: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(0)
        groups = self.num_groups
        shared = _tokens(random, 0, groups, SHARED)
        own = _tokens(random, 0, self.num_sequences, LENGTH - SHARED)
        member = np.arange(self.num_sequences) % groups
        # Distinct first tokens rule out accidental sharing.
        shared[:, 0] = np.arange(groups)
        own[:, 0] = np.arange(self.num_sequences) // groups
        other = _tokens(random, VOCABULARY, self.made_up, LENGTH - SHARED)
        self.keys = {
            "hit": np.hstack([shared[member], own]),
            "half": np.hstack([shared[np.arange(self.made_up) % groups], other]),
            "miss": _tokens(random, VOCABULARY, self.made_up, LENGTH),
        }
        blocks_shared, blocks_own = SHARED // self.block_size, self.leaf_blocks
        first_own = 1 + groups * blocks_shared + np.arange(self.num_sequences) * blocks_own
        self.blocks = np.hstack(
            [
                (1 + member * blocks_shared)[:, None] + np.arange(blocks_shared),
                first_own[:, None] + np.arange(blocks_own),
            ]
        ).astype(np.int32)

    @property
    def num_groups(self) -> int:
        return -(-self.num_sequences // self.group)

    @property
    def leaf_blocks(self) -> int:
        """Blocks that a sequence does not share."""
        return (LENGTH - SHARED) // self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of all sequences."""
        return int(self.blocks.max())

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "sequences": self.num_sequences,
            "tokens": LENGTH,
            "shared": SHARED,
            "group": self.group,
            "block_size": self.block_size,
        }


class CacheFlush:
    """Reader of more memory than the processor's caches hold, which evicts their contents."""

    def __init__(self, smoke: bool = False) -> None:
        self._memory = np.ones(2**16 if smoke else max(2**26, 4 * last_level_cache()), np.int8)

    def __call__(self) -> None:
        self._memory.view(np.int64).sum()


def _tokens(random: np.random.Generator, start: int, rows: int, length: int) -> NDArray[np.int32]:
    return random.integers(start, start + VOCABULARY, (rows, length), np.int32)
