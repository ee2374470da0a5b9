"""Requests that the stored blocks of KV events imply.

Events show the blocks that an engine computed, not those that it found cached. A `BlockStored` therefore counts as a
request for the blocks before it, which the engine reused, and for its own. One that continues where the last
`BlockStored` of the same sequence ended is the same request: only its own blocks are looked up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.storage.checks import shown
from pagecore.tiers.events.wire import STORED, BlockHash, Event, batch_of

Implied = tuple[float, NDArray[np.uint64], int, int]


class StoredChains:
    """Paths of the stored blocks by the hash of their last block.

    Parameters
    ----------
    block_size : int
        Expected tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[BlockHash, int] = {}  # of each hash
        self._parents: list[int] = []
        self._tips: set[int] = set()

    def read(self, content: Any) -> list[Implied]:
        """Return (seconds, hashes, tokens, first block that is looked up) for each request of a batch.

        Raises
        ------
        ValueError
            The content is not a batch of events, or has another block size or an impossible time.
        """
        batch = batch_of(content)
        if batch.timestamp < 0:
            raise ValueError(f"timestamp is {batch.timestamp}; expected a number of seconds, 0 or more")
        stored = [
            event
            for event in batch.events
            if event["type"] == STORED
            and event["block_hashes"]
            and event.get("medium") in (None, "GPU")
            and not event.get("group_idx")
        ]
        return [self._request(event, batch.timestamp) for event in stored]

    def _request(self, event: Event, seconds: float) -> Implied:
        if event["block_size"] != self.block_size:
            raise ValueError(
                f"the block_size of an event is {shown(event['block_size'])}, but {self.block_size} is asked for; ask "
                "for the block size of the engine"
            )
        parent = event.get("parent_block_hash")
        tip = -1 if parent is None else self._number(parent, -1)
        path = self._path(tip)
        is_continued = tip in self._tips
        first = len(path) if is_continued else 0
        self._tips.discard(tip)
        for each in event["block_hashes"]:
            tip = self._number(each, tip)
            path.append(tip)
        self._tips.add(tip)
        return seconds, np.array(path, np.uint64), len(path) * self.block_size + 1, first

    def _number(self, block: BlockHash, parent: int) -> int:
        number = self._numbers.setdefault(block, len(self._parents))
        if number == len(self._parents):
            self._parents.append(parent)
        return number

    def _path(self, tip: int) -> list[int]:
        path = []
        while tip >= 0:
            path.append(tip)
            tip = self._parents[tip]
        return path[::-1]
