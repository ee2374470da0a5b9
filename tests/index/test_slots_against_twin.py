"""SlotAllocator and its plain twin under the same random calls, including failing ones."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagecore.errors import OutOfBlocks, PagecoreError
from pagecore.index import BlockPool, SlotAllocator
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.block_pool import BlockPool as TwinPool
from tests.reference.slot_allocator import SlotAllocator as TwinAllocator

wild_slots = st.one_of(st.integers(-3, 130), st.sampled_from([2**31, 2**62, -(2**63), 2**63 - 1]))


class SlotsMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        order=st.sampled_from(["lifo", "fifo", "address"]),
        num_blocks=st.integers(2, 30),
        dtype=st.sampled_from(["int64", "int32"]),
    )
    def make(self, block_size, order, num_blocks, dtype):
        self.pool = BlockPool(num_blocks, order=order)
        self.twin_pool = TwinPool(num_blocks, order)
        self.allocator = SlotAllocator(self.pool, block_size, index_dtype=dtype)
        self.twin = TwinAllocator(self.twin_pool, block_size)
        self.sequences = []  # slots of each
        self.groups = []
        self.shared = []  # references of another holder

    # Calls of both.

    def both(self, name, *arguments):
        """Call both; they return equal results or raise equal errors."""
        try:
            expected = getattr(self.twin, name)(*arguments)
        except PagecoreError as error:
            with pytest.raises(type(error)) as refused:
                getattr(self.allocator, name)(*arguments)
            self.check_figures(refused.value, error)
            return None
        self.check_slots(getattr(self.allocator, name)(*arguments), expected)
        return expected

    def check_figures(self, refused, expected):
        if isinstance(expected, OutOfBlocks):
            assert (refused.requested, refused.available) == (expected.requested, expected.available)

    def check_slots(self, result, expected):
        if isinstance(expected, list):
            assert result.dtype == self.allocator.index_dtype
            result = result.tolist()
        assert result == expected

    def taking(self, data, name, *arguments):
        """Call a method that takes slots: the raising or the try_ form, with or without `out`."""
        form = data.draw(st.sampled_from(["must", "try", "out"]))
        if form == "must":
            return self.both(name, *arguments)
        out = np.full(600, -7, data.draw(st.sampled_from(["int64", "int32"]))) if form == "out" else None
        attempt = getattr(self.allocator, f"try_{name}")
        try:
            expected = getattr(self.twin, name)(*arguments)
        except OutOfBlocks:
            assert attempt(*arguments, out=out) is None
            assert out is None or (out == -7).all()
            return None
        except PagecoreError as error:
            with pytest.raises(type(error)):
                attempt(*arguments, out=out)
            assert out is None or (out == -7).all()
            return None
        assert attempt(*arguments, out=out).tolist() == expected
        if out is not None:
            assert out[: len(expected)].tolist() == expected
            assert (out[len(expected) :] == -7).all()
        return expected

    def some(self, data):
        order = data.draw(st.permutations(range(len(self.sequences))))
        return order[: data.draw(st.integers(0, min(len(order), 4)))]

    # Taking slots.

    @rule(data=st.data(), n=st.one_of(st.integers(0, 12), st.integers(-1, 500)))
    def allocate(self, data, n):
        slots = self.taking(data, "allocate", n)
        if slots is not None:
            self.sequences.append(slots)

    @rule(data=st.data())
    def extend(self, data):
        which = self.some(data)
        prefix = [len(self.sequences[i]) for i in which]
        grown = [length + data.draw(st.one_of(st.integers(0, 9), st.integers(-1, 99))) for length in prefix]
        last = [self.sequences[i][-1] if self.sequences[i] else -1 for i in which]
        slots = self.taking(data, "extend", prefix, grown, last)
        if slots is not None:
            for i, before, after in zip(which, prefix, grown, strict=True):
                self.sequences[i] = self.sequences[i] + slots[: after - before]
                slots = slots[after - before :]

    @rule(data=st.data())
    def decode(self, data):
        which = self.some(data)
        lengths = [len(self.sequences[i]) + 1 for i in which]
        last = [self.sequences[i][-1] if self.sequences[i] else -1 for i in which]
        slots = self.taking(data, "decode", lengths, last)
        for i, slot in zip(which, slots or [], strict=slots is not None):
            self.sequences[i] = [*self.sequences[i], slot]

    @rule(data=st.data(), name=st.sampled_from(["extend", "decode"]))
    def grow_what_may_not_grow(self, data, name):
        """Pass inconsistent lengths and slots, or those of freed sequences; most are refused."""
        n = data.draw(st.integers(0, 3))
        known = [slots[-1] for slots in self.sequences if slots]
        slot = st.one_of(wild_slots, st.sampled_from(known)) if known else wild_slots
        lengths = st.lists(st.integers(-1, 20), min_size=n, max_size=n)
        last = data.draw(st.lists(slot, min_size=n, max_size=n))
        if name == "decode":
            taken = self.taking(data, name, data.draw(lengths), last)
        else:
            prefix = data.draw(lengths)
            taken = self.taking(data, name, prefix, [p + data.draw(st.integers(-1, 9)) for p in prefix], last)
        size = self.allocator.block_size
        for slot in taken or []:
            if slot % size == 0:  # a block that none of our sequences continues
                self.shared.append(slot // size)

    # Freeing slots.

    @rule(data=st.data())
    def free(self, data):
        which = self.some(data)
        slots = [slot for i in which for slot in self.sequences[i]]
        if self.both("free", slots) is not None:
            self.sequences = [slots for i, slots in enumerate(self.sequences) if i not in which]

    @rule(data=st.data())
    def free_a_tail(self, data):
        """Free from a position on, which must start a block."""
        if not self.sequences:
            return
        i = data.draw(st.integers(0, len(self.sequences) - 1))
        keep = data.draw(st.integers(0, len(self.sequences[i])))
        if self.both("free", self.sequences[i][keep:]) is not None:
            self.sequences[i] = self.sequences[i][:keep]

    @rule(data=st.data())
    def free_what_may_not_be_held(self, data):
        """Free a valid list with an extra entry."""
        slots = [slot for i in self.some(data) for slot in self.sequences[i]]
        at = data.draw(st.integers(0, len(slots)))
        added = data.draw(st.lists(st.one_of(wild_slots, st.sampled_from(slots or [0])), min_size=1, max_size=3))
        refs = list(self.twin_pool.holders)
        if self.both("free", slots[:at] + added + slots[at:]) is not None:
            # The list was valid: its slots no longer belong to a sequence.
            gone = {block for block, before in enumerate(refs) if self.twin.holders(block) < before}
            size = self.allocator.block_size
            self.sequences = [s for s in self.sequences if not gone & {slot // size for slot in s}]

    @precondition(lambda self: len(self.groups) < 3)
    @rule()
    def open_a_group(self):
        self.groups.append(self.allocator.free_group())
        assert self.groups[-1].__enter__() is self.groups[-1]
        self.twin.begin_group()

    @precondition(lambda self: self.groups)
    @rule()
    def close_a_group(self):
        group = self.groups.pop()
        try:
            expected = self.twin.end_group()
        except PagecoreError as error:
            with pytest.raises(type(error)):
                group.__exit__(None, None, None)
        else:
            group.__exit__(None, None, None)
            assert group.num_freed == expected

    # Other holders of blocks of the pool.

    @rule(data=st.data())
    def somebody_shares(self, data):
        held = [block for block, holders in enumerate(self.twin_pool.holders) if holders > 0]
        if held:
            self.shared.append(data.draw(st.sampled_from(held)))
            self.pool.share(self.shared[-1])
            self.twin_pool.share([self.shared[-1]])

    @rule(data=st.data())
    def somebody_frees(self, data):
        """Free a reference of the other holder, or sometimes one of ours."""
        if not self.shared:
            return
        block = self.shared.pop(data.draw(st.integers(0, len(self.shared) - 1)))
        for _ in range(1 + (data.draw(st.integers(0, 5)) == 0)):
            if self.twin_pool.holders[block] > 0:
                assert self.pool.free(block) == self.twin_pool.free([block])

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_invariants()
        assert self.pool.ref_counts().tolist() == self.twin_pool.holders
        assert self.allocator.num_available == self.twin.num_available


TestSlotsAgainstTwin = pytest.mark.slow(drawn(SlotsMachine))
TestSlotsAgainstTwin.settings = settings(max_examples=100 if is_full() else 27, deadline=None)
