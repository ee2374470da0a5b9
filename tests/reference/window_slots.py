"""WindowSlotAllocator in plain Python: the slot allocator, and a dictionary of window blocks."""

from __future__ import annotations

from pagecore.errors import DoubleFree, InvalidBlock, OutOfBlocks
from tests.reference.block_pool import BlockPool
from tests.reference.slot_allocator import SlotAllocator


class WindowSlotAllocator(SlotAllocator):
    """Twin of `pagecore.index.WindowSlotAllocator`; lists in, lists out.

    `peers[block]` lists the window block once for each reference that the full block has to it.
    """

    def __init__(self, full: BlockPool, window: BlockPool, block_size: int):
        super().__init__(full, block_size)
        self.window = window
        self.peers: dict[int, list[int]] = {}

    def take_block(self) -> int:
        block = super().take_block()
        self.limit(block, 0)  # left by another holder, who freed the full block
        self.peers[block] = self.window.allocate(1)
        return block

    def check_continued(self, block: int) -> None:
        super().check_continued(block)
        if block not in self.peers:
            raise InvalidBlock(str(block))

    def check_room(self, needed: int) -> None:
        free = self.pool.num_free, self.window.num_free
        if needed > min(free):
            raise OutOfBlocks("short", (needed, needed), free)

    def limit(self, block: int, references: int) -> int:
        freed = 0
        while len(self.peers.get(block, [])) > references:
            peer = self.peers[block].pop()
            freed += self.window.free([peer]) if self.window.holders[peer] > 0 else 0
        if not self.peers.get(block):
            self.peers.pop(block, None)
        return freed

    def drop(self, block: int) -> int:
        self.limit(block, self.pool.holders[block] - 1)
        return super().drop(block)

    def listed(self, slots: list[int]) -> list[int]:
        blocks = []
        for before, slot in zip([-1, *slots], slots, strict=False):
            if not self.is_slot(slot) or (slot % self.block_size and slot != before + 1):
                raise InvalidBlock(str(slot))
            if slot % self.block_size == 0:
                blocks.append(slot // self.block_size)
        for block in blocks:
            if self.holders(block) <= 0:
                raise DoubleFree(str(block))
        return blocks

    def release_window(self, slots: list[int]) -> int:
        return sum(self.limit(block, max(0, len(self.peers.get(block, [])) - 1)) for block in self.listed(slots))

    def share(self, slots: list[int]) -> None:
        for block in self.listed(slots):
            self.pool.share([block])
            if self.peers.get(block) and self.window.holders[self.peers[block][0]] > 0:
                self.window.share(self.peers[block][:1])
                self.peers[block].append(self.peers[block][0])

    @property
    def full_to_window(self) -> list[int]:
        size = self.block_size
        entries = [0] * (self.pool.num_blocks * size) + [-1]
        for block, peers in self.peers.items():
            entries[block * size : (block + 1) * size] = range(peers[0] * size, (peers[0] + 1) * size)
        return entries

    @property
    def num_available(self) -> int:
        return min(self.pool.num_free, self.window.num_free) * self.block_size
