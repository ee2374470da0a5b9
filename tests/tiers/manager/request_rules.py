"""Rules of machines that draw requests of stores: batches that end or fail, requests given up, and entries lost."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.tiers.manager.request_world import BLOCK

NAMESPACES = st.sampled_from([None, "tenant"])


def prompts(most):
    """Return a strategy of prompts of up to `most` blocks that share prefixes: each token is one of two."""
    return st.lists(st.integers(0, 1), min_size=1, max_size=most).map(
        lambda blocks: np.repeat(np.array([*blocks, 0], np.int32), BLOCK)[: len(blocks) * BLOCK + 1]
    )


class RequestRules(RuleBasedStateMachine):
    """Base of machines with a `side` of scripted `stores`, whose clock is `now`."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.requests = []

    def open_batches(self):
        return [(store, ticket) for store in self.stores for ticket in store.batches]

    @precondition(lambda self: self.open_batches())
    @rule(data=st.data())
    def finish(self, data):
        store, ticket = data.draw(st.sampled_from(self.open_batches()))
        count = len(store.batches[ticket][1])
        fails = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
        store.finish(ticket, fails=fails, error="planted" if fails else None)

    @rule(seconds=st.sampled_from([0.5, 20.0]))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), what=st.sampled_from(["cancel", "release"]))
    def give_up(self, data, what):
        request = data.draw(st.sampled_from(self.requests))
        if what == "cancel":
            request.cancel()
        elif request.has_ended:
            request.release()

    @rule(tokens=prompts(12), namespace=NAMESPACES, begin=st.integers(0, 5))
    def remove(self, tokens, namespace, begin):
        self.side.remove(tokens, namespace, None, begin)

    @rule(data=st.data())
    def lose(self, data):
        store = data.draw(st.sampled_from(self.stores))
        if store.entries:
            del store.entries[data.draw(st.sampled_from(sorted(store.entries)))]

    @rule(data=st.data())
    def break_or_mend(self, data):
        store = data.draw(st.sampled_from(self.stores))
        store.refuses = None if store.refuses else OSError("planted")
