"""Hits of any eviction policy at one capacity, by simulation with the prefix tree of the cache.

The tree gets numbers of blocks as its tokens, with blocks of one: a prefix of blocks is a prefix of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pagecore.index import RadixTree
from pagecore.serving.whatif.requests import Requests

Path = tuple[NDArray[np.int32], int, int, int]


def paths_of(chunks: Sequence[Requests]) -> Iterator[Path]:
    """Yield the blocks of each request, its first block and number of blocks that are looked up, and its tokens."""
    for chunk in chunks:
        for i in range(len(chunk)):
            path = chunk.blocks[chunk.starts[i] : chunk.starts[i + 1]]
            yield path, int(chunk.first[i]), int(chunk.reusable[i]), int(chunk.tokens[i])


def one_lane(blocks: NDArray[np.int32] | tuple[NDArray[np.int32], ...]) -> list[int]:
    """Return the blocks of a tree with one lane as a list."""
    assert isinstance(blocks, np.ndarray)
    found: list[int] = blocks.tolist()
    return found


def simulated_hits(
    chunks: Sequence[Requests], block_size: int, capacity: int, policy: str, max_tokens_per_step: int = 8192
) -> int:
    """Return the blocks that a cache of `capacity` usable blocks finds, when requests run one after another.

    Parameters
    ----------
    chunks : sequence of Requests
    block_size, capacity : int
    policy : str
        Policy of `RadixTree` that needs no value for each prefix.
    max_tokens_per_step : int
        A longer prompt is computed, and published, in several steps.
    """
    tree = RadixTree(1, policy=policy)
    # With a block for every block of the trace nothing is evicted, so a larger cache finds the same.
    capacity = min(capacity, sum(int((-(-chunk.tokens // block_size)).sum()) for chunk in chunks))
    free = list(range(capacity, 0, -1))
    found = 0
    for path, first, reusable, tokens in paths_of(chunks):
        if -(-tokens // block_size) > capacity:
            continue
        with tree.match_and_lock(path[:reusable]) as receipt:
            hit = receipt.num_tokens
            found += max(0, min(hit, reusable) - first)
            own = np.full(-(-tokens // block_size), 1, np.int32)
            taken = hit
            computed = hit * block_size
            kept: set[int] = set()
            while computed < tokens:
                computed = min(tokens, computed + max_tokens_per_step)
                count = -(-computed // block_size)
                if count - taken > len(free):
                    free += one_lane(tree.evict("full", count - taken - len(free)).blocks)
                for i in range(taken, count):
                    own[i] = free.pop()
                taken = count
                whole = computed // block_size
                if whole > hit:
                    kept.update(one_lane(tree.extend(path[:whole], own[:whole], receipt).taken))
            free += [block for block in own[hit:].tolist() if block not in kept]
    return found
