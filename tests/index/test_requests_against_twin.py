"""RequestTable and its plain twin under the same random calls, including failing ones."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagecore.errors import OutOfRows, PagecoreError
from pagecore.index import RequestTable
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.request_table import RequestTable as TwinTable

any_slot = st.one_of(st.integers(-2, 10**6), st.sampled_from([2**31 - 1, -(2**31)]))
wide_slot = st.one_of(any_slot, st.sampled_from([2**31, -(2**31) - 1, 2**62, 2**63 - 1, -(2**63)]))


class RequestsMachine(RuleBasedStateMachine):
    @initialize(
        num_requests=st.integers(1, 7), max_context=st.integers(1, 12), dtype=st.sampled_from(["int32", "int64"])
    )
    def make(self, num_requests, max_context, dtype):
        self.requests = RequestTable(num_requests, max_context, dtype)
        self.twin = TwinTable(num_requests, max_context, dtype)

    def both(self, name, *arguments):
        """Call both; they return equal results or raise equal errors."""
        try:
            expected = getattr(self.twin, name)(*arguments)
        except PagecoreError as error:
            with pytest.raises(type(error)):
                getattr(self.requests, name)(*arguments)
            return
        result = getattr(self.requests, name)(*arguments)
        assert (result.tolist() if isinstance(result, np.ndarray) else result) == expected

    def a_row(self, data):
        """Draw a row, mostly a used one."""
        wild = st.integers(-1, self.twin.num_requests)
        return data.draw(st.one_of(st.sampled_from(sorted(self.twin.rows)), wild) if self.twin.rows else wild)

    @rule(n=st.integers(-1, 8))
    def allocate(self, n):
        self.both("allocate", n)

    @rule(n=st.integers(0, 8))
    def try_allocate(self, n):
        try:
            expected = self.twin.allocate(n)
        except OutOfRows:
            assert self.requests.try_allocate(n) is None
        else:
            assert self.requests.try_allocate(n).tolist() == expected

    @rule(data=st.data())
    def free(self, data):
        self.both("free", [self.a_row(data) for _ in range(data.draw(st.integers(0, 3)))])

    @rule(data=st.data())
    def write_one_row(self, data):
        room = self.twin.max_context
        slots = data.draw(st.lists(any_slot, max_size=room + 1))
        self.both("write", [self.a_row(data)], [data.draw(st.integers(-1, room + 1))], slots)

    @rule(data=st.data())
    def write_one_slot_each(self, data):
        rows = [self.a_row(data) for _ in range(data.draw(st.integers(0, 4)))]
        starts = [data.draw(st.integers(0, self.twin.max_context)) for _ in rows]
        self.both("write", rows, starts, [data.draw(wide_slot) for _ in rows])

    @rule(data=st.data())
    def write_many_rows(self, data):
        rows = [self.a_row(data) for _ in range(data.draw(st.integers(0, 4)))]
        starts = [data.draw(st.integers(0, self.twin.max_context)) for _ in rows]
        counts = [data.draw(st.integers(-int(start == 0), max(0, 5 - start // 2))) for start in starts]
        total = max(0, sum(counts) + data.draw(st.sampled_from([0, 0, 0, 0, 1, -1])))
        self.both("write", rows, starts, data.draw(st.lists(any_slot, min_size=total, max_size=total)), counts)

    @rule(data=st.data())
    def read(self, data):
        bounds = data.draw(st.lists(st.integers(-1, self.twin.max_context + 1), max_size=2))
        self.both("read", self.a_row(data), *bounds)

    @rule(data=st.data())
    def length(self, data):
        self.both("length", self.a_row(data))

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "requests"):
            return
        self.requests.check_invariants()
        twin = self.twin
        assert (self.requests.num_free, self.requests.num_used) == (twin.num_free, twin.num_used)
        assert self.requests.table.tolist() == [
            [twin.entry(row, position) for position in range(twin.max_context)] for row in range(twin.num_requests)
        ]


TestRequestsAgainstTwin = pytest.mark.slow(drawn(RequestsMachine))
TestRequestsAgainstTwin.settings = settings(max_examples=100 if is_full() else 27, deadline=None)
