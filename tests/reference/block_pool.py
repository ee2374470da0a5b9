"""BlockPool in plain Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pagecore.errors import DoubleFree, InvalidBlock, OutOfBlocks, ShapeError


class BlockPool:
    """Twin of `pagecore.index.BlockPool`; lists in, lists out."""

    def __init__(self, num_blocks: int, order: str = "lifo"):
        if not 2 <= num_blocks < 2**31:
            raise ShapeError(str(num_blocks))
        self.num_blocks = num_blocks
        self.order = order
        self.holders = [0] * num_blocks
        # The next block to be allocated is the last of the list in lifo order, else the first.
        ids = range(1, num_blocks)
        self.free_ids = deque(reversed(ids) if order == "lifo" else ids)
        self.retired: list[tuple[int, int]] = []  # (step, block), in the order of retirement

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        saved = self.holders.copy(), self.free_ids.copy(), self.retired.copy()
        try:
            yield
        except Exception:
            self.holders, self.free_ids, self.retired = saved
            raise

    def take(self) -> int:
        block = self.free_ids.pop() if self.order == "lifo" else self.free_ids.popleft()
        self.holders[block] = 1
        return block

    def give_back(self, block: int) -> None:
        self.free_ids.append(block)
        if self.order == "address":
            self.free_ids = deque(sorted(self.free_ids))

    def drop(self, block: int) -> bool:
        """Drop one reference; return True if it was the last."""
        if not 0 < block < self.num_blocks:
            raise InvalidBlock(str(block))
        if self.holders[block] == 0:
            raise DoubleFree(str(block))
        self.holders[block] -= 1
        return self.holders[block] == 0

    def allocate(self, n: int) -> list[int]:
        if n < 0:
            raise ShapeError(str(n))
        if n > self.num_free:
            raise OutOfBlocks("short", n, self.num_free)
        return [self.take() for _ in range(n)]

    def share(self, blocks: list[int]) -> None:
        with self.all_or_nothing():
            for block in blocks:
                self.drop(block)
                self.holders[block] += 2

    def free(self, blocks: list[int]) -> int:
        freed = 0
        with self.all_or_nothing():
            for block in blocks:
                if self.drop(block):
                    self.give_back(block)
                    freed += 1
        return freed

    def retire(self, blocks: list[int], step: int) -> int:
        before = len(self.retired)
        with self.all_or_nothing():
            for block in blocks:
                if self.drop(block):
                    self.retired.append((step, block))
        return len(self.retired) - before

    def reclaim(self, step: int) -> int:
        over = sorted((entry for entry in self.retired if entry[0] <= step), key=lambda entry: entry[0])
        self.retired = [entry for entry in self.retired if entry[0] > step]
        for _, block in over:
            self.give_back(block)
        return len(over)

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    @property
    def num_retired(self) -> int:
        return len(self.retired)

    @property
    def num_used(self) -> int:
        return sum(count > 0 for count in self.holders)
