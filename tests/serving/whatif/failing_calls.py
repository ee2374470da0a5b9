"""Stacks and numbers of what-if for tests in which memory runs out."""

import numpy as np

from pagecore.serving.whatif._stack import Numbers, Stack
from tests.failing_calls import Case


class Stacks:
    """A stack and numbers with what they have counted."""

    def __init__(self):
        self.numbers, self.stack = Numbers(), Stack(1.0, (50, 2000))
        self.add(0, 900)

    def add(self, first, count):
        blocks = self.numbers.of(np.arange(first, first + count, dtype=np.uint64))
        ends = np.array([0, count])
        self.stack.add(blocks, ends, np.zeros(1, np.int64), ends[1:], np.zeros(1, np.uint8))

    def signature(self):
        """Return the state, to which it adds a request of old and new blocks."""
        seen = self.stack.num_lookups
        numbers = self.numbers.of(np.arange(900, dtype=np.uint64)).tolist()
        self.add(100, 300)
        return seen, numbers, self.stack.num_lookups, self.stack.hits().tolist()


STACK_CALLS = {
    "new": lambda state: (Numbers(), Stack(0.5, (1, 2, 3))),
    "known blocks": lambda state: state.add(300, 500),
    "new blocks": lambda state: state.add(700, 400),
    "many new blocks": lambda state: state.add(700, 5000),
}

CASES = {name: Case(Stacks, call) for name, call in STACK_CALLS.items()}
