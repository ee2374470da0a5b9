"""The prefix caches that bench/prefix.py times: ours and a plain dictionary, under the same calls.

A call takes a list of things, so that what is timed is a loop of single calls of the cache and little else. All
arguments of those are made beforehand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.prefix_load import LENGTH, SHARED, Load
from pagecore.index import RadixTree


class Side(ABC):
    """A cache that holds the sequences of a load.

    They go round in a ring: the least recently used give up what only they have, and are inserted again. So the cache
    holds them all before and after each figure, and what goes is known beforehand: the sequences from `oldest` on.
    """

    name = ""
    # Another way in which it can be asked for a match: the way's name, and the method's.
    other_match: tuple[str, str] | None = None
    # Figure -> how many times faster ours is to be.
    targets: Mapping[str, float] = MappingProxyType({})

    def __init__(self, load: Load) -> None:
        self.load = load
        self.keys = {kind: [self.key(tokens) for tokens in rows] for kind, rows in load.keys.items()}
        self.oldest = 0
        self.missing: list[int] = []
        self.unsettled: list[Any] = []

    def fill(self) -> None:
        """Insert every sequence, the first one first."""
        self.insert(range(self.load.num_sequences))
        self.settle()
        self.oldest = 0

    def note_missing(self, count: int) -> None:
        """The `count` oldest were evicted just now."""
        total = self.load.num_sequences
        self.missing = [number % total for number in range(self.oldest, self.oldest + count)]
        self.oldest = (self.oldest + count) % total

    def glance(self, count: int) -> None:
        """Look at the `count` that go next, which a cache can refuse whose order of use that would change."""
        keys = self.keys["hit"]
        self.match([keys[number % len(keys)] for number in range(self.oldest, self.oldest + count)])

    def make_room(self, count: int) -> None:
        """Evict the `count` oldest, and note who they are."""
        self.evict_leaves(count)
        self.note_missing(count)

    def insert_missing(self) -> None:
        self.insert(self.missing)

    def settle(self) -> None:
        """Let go of what was inserted, where the cache has its users hold it."""
        self.unsettled.clear()

    @abstractmethod
    def key(self, tokens: NDArray[np.int32]) -> Any:
        """What the calls take for a sequence of tokens."""

    @abstractmethod
    def insert(self, numbers: Iterable[int]) -> None:
        """Insert these sequences, one call for each; `settle` follows."""

    @abstractmethod
    def evict_leaves(self, count: int) -> Any:
        """Evict as many blocks as a sequence has of its own, `count` times."""

    @abstractmethod
    def evict_at_once(self, count: int) -> Any:
        """Evict as many blocks as `count` sequences have of their own, in one call."""

    @abstractmethod
    def drain(self) -> Any:
        """Evict everything in one call."""

    @abstractmethod
    def match(self, keys: list[Any]) -> None:
        """Look each key up."""

    @abstractmethod
    def lengths(self, keys: list[Any]) -> list[int]:
        """Tokens of each key that are found."""

    @abstractmethod
    def hold(self, keys: list[Any]) -> list[Any]:
        """Pin what is found for each key, and say what was pinned."""

    @abstractmethod
    def release(self, held: list[Any]) -> None:
        """Undo `hold`."""

    @abstractmethod
    def lock_again(self, held: list[Any]) -> None:
        """Pin and unpin each of what is held once more."""

    @abstractmethod
    def match_and_lock(self, keys: list[Any]) -> None:
        """Look each key up, pin what is found, and unpin it."""


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
        """The missing ones in one call."""
        keys, blocks = self.keys["hit"], self.blocks
        self.tree.insert_all([{"tokens": keys[number], "blocks": blocks[number]} for number in self.missing])

    def evict_leaves(self, count: int) -> list[NDArray[np.int32]]:
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
    """One dictionary, from the chained hash of a block's prefix to the block, the least recently used first.

    It compares no tokens, refuses nothing and evicts whatever comes first, pinned or not; that favours it.
    """

    name = "Python dict of chained hashes"
    # More would take gigabytes, and minutes to fill.
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
            # The last first, so that a prefix is older than what goes on from it and goes after it.
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
    """What a key of a kind must find."""
    expected = {"hit": LENGTH, "half": SHARED, "miss": 0}[kind]
    assert set(side.lengths(keys)) == {expected}, (side.name, kind)
