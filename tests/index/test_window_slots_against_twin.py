"""WindowSlotAllocator and its plain twin under the same random calls, including failing ones."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from pagecore.index import BlockPool, WindowSlotAllocator
from tests.faults import is_full
from tests.index.test_slots_against_twin import SlotsMachine, wild_slots
from tests.machines import drawn
from tests.reference.block_pool import BlockPool as TwinPool
from tests.reference.window_slots import WindowSlotAllocator as TwinAllocator


class WindowSlotsMachine(SlotsMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        order=st.sampled_from(["lifo", "fifo", "address"]),
        num_blocks=st.tuples(st.integers(2, 30), st.integers(2, 20)),
        dtype=st.sampled_from(["int64", "int32"]),
    )
    def make(self, block_size, order, num_blocks, dtype):
        self.pool, self.window = (BlockPool(count, order=order) for count in num_blocks)
        self.twin_pool, self.twin_window = (TwinPool(count, order) for count in num_blocks)
        self.allocator = WindowSlotAllocator(self.pool, self.window, block_size, index_dtype=dtype)
        self.twin = TwinAllocator(self.twin_pool, self.twin_window, block_size)
        self.sequences, self.groups, self.shared, self.shared_window = [], [], [], []

    @rule(data=st.data())
    def release_window(self, data):
        """Release the whole blocks of sequences before a position, or a list that may be refused."""
        slots = []
        for i in self.some(data):
            slots += self.sequences[i][: data.draw(st.integers(0, len(self.sequences[i])))]
        if data.draw(st.integers(0, 3)) == 0:
            slots += data.draw(st.lists(st.one_of(wild_slots, st.sampled_from(slots or [0])), max_size=3))
        self.both("release_window", slots)

    @rule(data=st.data())
    def share_a_prefix(self, data):
        """Let another sequence begin with whole blocks of one."""
        if not self.sequences:
            return
        source = data.draw(st.sampled_from(self.sequences))
        size = self.allocator.block_size
        slots = source[: data.draw(st.integers(0, len(source))) // size * size]
        if self.same_share(slots):
            self.sequences.append(list(slots))

    def same_share(self, slots):
        before = list(self.twin_pool.holders)
        self.both("share", slots)
        return not slots or list(self.twin_pool.holders) != before

    @rule(data=st.data())
    def another_holder_of_a_window_block(self, data):
        held = [block for block, holders in enumerate(self.twin_window.holders) if holders > 0]
        if held:
            self.shared_window.append(data.draw(st.sampled_from(held)))
            self.window.share(self.shared_window[-1])
            self.twin_window.share([self.shared_window[-1]])

    @rule(data=st.data())
    def another_holder_frees_a_window_block(self, data):
        if not self.shared_window:
            return
        block = self.shared_window.pop(data.draw(st.integers(0, len(self.shared_window) - 1)))
        if self.twin_window.holders[block] > 0:
            assert self.window.free(block) == self.twin_window.free([block])

    @invariant()
    def has_the_same_map(self):
        if hasattr(self, "window"):
            assert self.window.ref_counts().tolist() == self.twin_window.holders
            assert self.allocator.full_to_window.tolist() == self.twin.full_to_window


TestWindowSlotsAgainstTwin = pytest.mark.slow(drawn(WindowSlotsMachine))
TestWindowSlotsAgainstTwin.settings = settings(max_examples=100 if is_full() else 27, deadline=None)
