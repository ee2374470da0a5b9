"""SlotAllocator in plain Python, one slot at a time; a call that fails restores a saved copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from pagecore.errors import DoubleFree, InvalidBlock, OutOfBlocks, ShapeError
from tests.reference.block_pool import BlockPool


class SlotAllocator:
    """Twin of `pagecore.index.SlotAllocator`; lists in, lists out."""

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = block_size
        self.claimed: list[int] = []  # blocks that open groups will free
        self.depth = 0

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        saved = copy.deepcopy(vars(self.pool)), self.claimed.copy()
        try:
            yield
        except Exception:
            state, self.claimed = saved
            vars(self.pool).update(state)
            raise

    def holders(self, block: int) -> int:
        """Return the references without those that wait for the end of a group."""
        return self.pool.holders[block] - self.claimed.count(block)

    def is_slot(self, slot: int) -> bool:
        return self.block_size <= slot < self.block_size * self.pool.num_blocks

    def check_growth(self, prefix: int, length: int, last: int) -> None:
        if not 0 <= prefix <= length:
            raise ShapeError(f"{prefix} to {length}")
        if prefix > 0:
            if not self.is_slot(last):
                raise InvalidBlock(str(last))
            if (last + 1) % self.block_size != prefix % self.block_size:
                raise ShapeError(f"{last} does not end {prefix}")

    def next_slot(self, position: int, last: int) -> int:
        """Return the slot of the token after the one in slot `last`."""
        if position % self.block_size:
            return last + 1
        return self.take_block() * self.block_size

    def take_block(self) -> int:
        return self.pool.allocate(1)[0]

    def check_continued(self, block: int) -> None:
        if self.holders(block) <= 0:
            raise DoubleFree(str(block))

    def check_room(self, needed: int) -> None:
        if needed > self.pool.num_free:
            raise OutOfBlocks("short", needed, self.pool.num_free)

    def needed(self, prefix: int, length: int) -> int:
        return -(-length // self.block_size) - -(-prefix // self.block_size)

    def extend(self, prefix_lens: list[int], seq_lens: list[int], last_slots: list[int]) -> list[int]:
        if not len(prefix_lens) == len(seq_lens) == len(last_slots):
            raise ShapeError("uneven")
        batch = list(zip(prefix_lens, seq_lens, last_slots, strict=True))
        for prefix, length, last in batch:
            self.check_growth(prefix, length, last)
        for prefix, length, last in batch:  # continued blocks are checked before blocks are counted
            if prefix % self.block_size and length > prefix:
                self.check_continued(last // self.block_size)
        self.check_room(sum(self.needed(prefix, length) for prefix, length, _ in batch))
        return [slot for growth in batch for slot in self.grow(*growth)]

    def grow(self, prefix: int, length: int, last: int) -> list[int]:
        slots = [last]
        for position in range(prefix, length):
            slots.append(self.next_slot(position, slots[-1]))
        return slots[1:]

    def allocate(self, n: int) -> list[int]:
        return self.extend([0], [n], [-1])

    def decode(self, seq_lens: list[int], last_slots: list[int]) -> list[int]:
        return self.extend([length - 1 for length in seq_lens], seq_lens, last_slots)

    def free(self, slots: list[int]) -> int:
        started = []
        for before, slot in zip([-1, *slots], slots, strict=False):
            if not self.is_slot(slot):
                raise InvalidBlock(str(slot))
            if slot % self.block_size == 0:
                started.append(slot // self.block_size)
            elif slot != before + 1:
                raise InvalidBlock(str(slot))
        with self.all_or_nothing():
            for block in started:
                self.claim(block)
            return 0 if self.depth else self.give_back()

    def claim(self, block: int) -> None:
        if self.holders(block) <= 0:
            raise DoubleFree(str(block))
        self.claimed.append(block)

    def give_back(self) -> int:
        """Free every claimed block that is still held, in order; return the last one that is not."""
        freed, lost = 0, None
        for block in self.claimed:
            if self.pool.holders[block] > 0:
                freed += self.drop(block)
            else:
                lost = block
        self.claimed = []
        if lost is not None:
            raise DoubleFree(str(lost))
        return freed

    def drop(self, block: int) -> int:
        return self.pool.free([block])

    def begin_group(self) -> None:
        self.depth += 1

    def end_group(self) -> int:
        self.depth -= 1
        return 0 if self.depth else self.give_back()

    @property
    def num_available(self) -> int:
        return self.pool.num_free * self.block_size
