"""BlockPool and its plain twin under the same random calls."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagecore.errors import OutOfBlocks, PagecoreError
from pagecore.index import BlockPool
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.block_pool import BlockPool as TwinPool

# Ids around the ends of the pool, and some that no pool has.
ids = st.one_of(st.integers(-1, 200), st.sampled_from([2**31 - 1, -(2**31)]))
id_lists = st.lists(ids, max_size=6)
steps = st.integers(-2, 3)


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        order=st.sampled_from(["lifo", "fifo", "address"]), num_blocks=st.sampled_from([2, 3, 9, 64, 65, 66, 130, 200])
    )
    def make(self, order, num_blocks):
        self.pool = BlockPool(num_blocks, order=order)
        self.twin = TwinPool(num_blocks, order)

    def both(self, name, *arguments):
        """Call both; they return equal results or raise equal errors."""
        try:
            expected = getattr(self.twin, name)(*arguments)
        except PagecoreError as error:
            with pytest.raises(type(error)) as refused:
                getattr(self.pool, name)(*arguments)
            self.check_figures(refused.value, error)
            return
        result = getattr(self.pool, name)(*arguments)
        assert (result.tolist() if isinstance(result, np.ndarray) else result) == expected

    def check_figures(self, refused, expected):
        if isinstance(expected, OutOfBlocks):
            assert (refused.requested, refused.available) == (expected.requested, expected.available)

    def held(self, data):
        """Draw held blocks in any order, each at most as often as it has references."""
        references = [block for block, count in enumerate(self.twin.holders) for _ in range(count)]
        order = data.draw(st.permutations(references))
        return order[: data.draw(st.integers(0, len(order)))]

    @rule(n=st.integers(-1, 70))
    def allocate(self, n):
        self.both("allocate", n)

    @rule(n=st.integers(0, 210))
    def try_allocate(self, n):
        if n > self.twin.num_free:
            assert self.pool.try_allocate(n) is None
        else:
            assert self.pool.try_allocate(n).tolist() == self.twin.allocate(n)

    @rule(data=st.data())
    def free_held(self, data):
        self.both("free", self.held(data))

    @rule(data=st.data())
    def share_held(self, data):
        self.both("share", self.held(data)[:10])

    @rule(data=st.data(), step=steps)
    def retire_held(self, data, step):
        self.both("retire", self.held(data), step)

    @rule(step=steps)
    def reclaim(self, step):
        self.both("reclaim", step)

    @rule(data=st.data(), name=st.sampled_from(["free", "share"]), rest=id_lists)
    def change_what_may_not_be_held(self, data, name, rest):
        self.both(name, self.held(data)[:5] + rest)

    @rule(data=st.data(), step=steps, rest=id_lists)
    def retire_what_may_not_be_held(self, data, step, rest):
        self.both("retire", self.held(data)[:5] + rest, step)

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        assert self.pool.ref_counts().tolist() == self.twin.holders
        counters = ("num_free", "num_used", "num_retired")
        assert [getattr(self.pool, name) for name in counters] == [getattr(self.twin, name) for name in counters]
        assert self.pool.num_free + self.pool.num_used + self.pool.num_retired == self.pool.num_blocks - 1


TestPoolAgainstTwin = pytest.mark.slow(drawn(PoolMachine))
TestPoolAgainstTwin.settings = settings(max_examples=100 if is_full() else 27, deadline=None)
