"""Prefix caches that bench/index/prefix.py times, under one interface: pagecore's and a plain dictionary.

A call takes a list, so that a sample is a loop of single calls of the cache and little else. All arguments of the
single calls are made beforehand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.index.prefix_load import LENGTH, SHARED, Load
from pagecore.index import RadixTree


class Side(ABC):
    """A cache that holds the sequences of a load.

    The sequences form a ring: the least recently used lose their unshared halves and are inserted again. So the cache
    holds all sequences before and after each figure, and the next victims are known: the sequences from `oldest` on.
    """

    name = ""
    # A second way to match: its name, and the method.
    other_match: tuple[str, str] | None = None
    # Figure -> target ratio to this side.
    targets: Mapping[str, float] = MappingProxyType({})

    def __init__(self, load: Load) -> None:
        self.load = load
        self.keys = {kind: [self.key(tokens) for tokens in rows] for kind, rows in load.keys.items()}
        self.oldest = 0
        self.missing: list[int] = []
        self.unsettled: list[Any] = []

    def fill(self) -> None:
        """Insert every sequence in order."""
        self.insert(range(self.load.num_sequences))
        self.settle()
        self.oldest = 0

    def note_missing(self, count: int) -> None:
        """Record that the `count` oldest sequences were evicted."""
        total = self.load.num_sequences
        self.missing = [number % total for number in range(self.oldest, self.oldest + count)]
        self.oldest = (self.oldest + count) % total

    def glance(self, count: int) -> None:
        """Match the next `count` victims; a cache whose order of use would change may do nothing."""
        keys = self.keys["hit"]
        self.match([keys[number % len(keys)] for number in range(self.oldest, self.oldest + count)])

    def make_room(self, count: int) -> None:
        """Evict and record the `count` oldest sequences."""
        self.evict_leaves(count)
        self.note_missing(count)

    def insert_missing(self) -> None:
        self.insert(self.missing)

    def settle(self) -> None:
        """Release inserted sequences, if the cache makes its users hold them."""
        self.unsettled.clear()

    @abstractmethod
    def key(self, tokens: NDArray[np.int32]) -> Any:
        """Return what the calls take for a sequence of tokens."""

    @abstractmethod
    def insert(self, numbers: Iterable[int]) -> None:
        """Insert these sequences, one call for each; `settle` follows."""

    @abstractmethod
    def evict_leaves(self, count: int) -> Any:
        """Evict the number of a sequence's unshared blocks, `count` times."""

    @abstractmethod
    def evict_at_once(self, count: int) -> Any:
        """Evict the unshared blocks of `count` sequences in one call."""

    @abstractmethod
    def drain(self) -> Any:
        """Evict everything in one call."""

    @abstractmethod
    def match(self, keys: list[Any]) -> None:
        """Look up each key."""

    @abstractmethod
    def lengths(self, keys: list[Any]) -> list[int]:
        """Return the number of tokens found of each key."""

    @abstractmethod
    def hold(self, keys: list[Any]) -> list[Any]:
        """Pin what is found for each key; return the pins."""

    @abstractmethod
    def release(self, held: list[Any]) -> None:
        """Undo `hold`."""

    @abstractmethod
    def lock_again(self, held: list[Any]) -> None:
        """Pin and unpin each held path a second time."""

    @abstractmethod
    def match_and_lock(self, keys: list[Any]) -> None:
        """Look up each key, pin what is found, and unpin it."""


class Ours(Side):
    """RadixTree."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self.name = f"RadixTree, {load.num_sequences:,} sequences"
        self.blocks = list(load.blocks)
        self.tree = RadixTree(load.block_size)
        self.fill()

    def key(self, tokens: NDArray[np.int32]) -> Any:
        return tokens

    def insert(self, numbers: Iterable[int]) -> None:
        insert, keys, blocks = self.tree.insert, self.keys["hit"], self.blocks
        for number in numbers:
            insert(keys[number], blocks[number])

    def insert_all(self) -> None:
        """Insert the missing sequences in one call."""
        keys, blocks = self.keys["hit"], self.blocks
        self.tree.insert_all([{"tokens": keys[number], "blocks": blocks[number]} for number in self.missing])

    def evict_leaves(self, count: int) -> list[Any]:
        evict, amount = self.tree.evict, self.load.leaf_blocks
        return [evict("full", amount).blocks for _ in range(count)]

    def evict_at_once(self, count: int) -> Any:
        return self.tree.evict("full", count * self.load.leaf_blocks).blocks

    def drain(self) -> Any:
        return self.tree.evict("full", self.load.num_blocks).blocks

    def match(self, keys: list[Any]) -> None:
        match = self.tree.match
        for key in keys:
            match(key)

    def lengths(self, keys: list[Any]) -> list[int]:
        return [self.tree.match(key).num_tokens for key in keys]

    def hold(self, keys: list[Any]) -> list[Any]:
        return [self.tree.match_and_lock(key) for key in keys]

    def release(self, held: list[Any]) -> None:
        for receipt in held:
            receipt.release()

    def lock_again(self, held: list[Any]) -> None:
        for receipt in held:
            receipt.fork().release()

    def match_and_lock(self, keys: list[Any]) -> None:
        match_and_lock = self.tree.match_and_lock
        for key in keys:
            match_and_lock(key).release()


class ChainedDict(Side):
    """A dictionary from the chained hash of a block's prefix to the block, least recently used first.

    It does not compare tokens, validates nothing and evicts the oldest entries even if pinned, which favours it.
    """

    name = "Python dict of chained hashes"
    # More blocks would take gigabytes, and minutes to fill.
    BLOCKS_MAX = 6_000_000

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self.starts = range(0, 4 * LENGTH, 4 * load.block_size)
        self.step = 4 * load.block_size
        self.order: OrderedDict[int, int] = OrderedDict()
        self.pins = [0] * (load.num_blocks + 1)
        self.fill()

    def key(self, tokens: NDArray[np.int32]) -> Any:
        return tokens.tobytes()

    def insert(self, numbers: Iterable[int]) -> None:
        order, step = self.order, self.step
        for number in numbers:
            key, prefix, chain = self.keys["hit"][number], 0, []
            for start in self.starts:
                prefix = hash((prefix, key[start : start + step]))
                chain.append(prefix)
            blocks = self.load.blocks[number].tolist()
            # Last block first, so that a prefix is newer than its continuations and is evicted after them.
            for i in range(len(chain) - 1, -1, -1):
                if chain[i] in order:
                    order.move_to_end(chain[i])
                else:
                    order[chain[i]] = blocks[i]

    def _evict(self, amount: int) -> list[int]:
        pop = self.order.popitem
        return [pop(last=False)[1] for _ in range(amount)]

    def evict_leaves(self, count: int) -> list[list[int]]:
        return [self._evict(self.load.leaf_blocks) for _ in range(count)]

    def evict_at_once(self, count: int) -> list[int]:
        return self._evict(count * self.load.leaf_blocks)

    def drain(self) -> list[int]:
        return self._evict(len(self.order))

    def _find(self, key: bytes) -> list[int]:
        find, step, prefix, found = self.order.get, self.step, 0, []
        for start in self.starts:
            prefix = hash((prefix, key[start : start + step]))
            block = find(prefix)
            if block is None:
                break
            found.append(block)
        return found

    def match(self, keys: list[Any]) -> None:
        for key in keys:
            self._find(key)

    def lengths(self, keys: list[Any]) -> list[int]:
        return [len(self._find(key)) * self.load.block_size for key in keys]

    def hold(self, keys: list[Any]) -> list[Any]:
        held = [self._find(key) for key in keys]
        for blocks in held:
            self._pin(blocks, 1)
        return held

    def release(self, held: list[Any]) -> None:
        for blocks in held:
            self._pin(blocks, -1)

    def _pin(self, blocks: list[int], by: int) -> None:
        pins = self.pins
        for block in blocks:
            pins[block] += by

    def lock_again(self, held: list[Any]) -> None:
        for blocks in held:
            self._pin(blocks, 1)
            self._pin(blocks, -1)

    def match_and_lock(self, keys: list[Any]) -> None:
        for key in keys:
            blocks = self._find(key)
            self._pin(blocks, 1)
            self._pin(blocks, -1)


def check_found(side: Side, kind: str, keys: list[Any]) -> None:
    """Check the lengths that keys of a kind must find."""
    expected = {"hit": LENGTH, "half": SHARED, "miss": 0}[kind]
    assert set(side.lengths(keys)) == {expected}, (side.name, kind)
