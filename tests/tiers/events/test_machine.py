"""Random operations on a cache: the mirror equals its trees at every sequence number."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagecore.errors import OutOfBlocks
from pagecore.index import RadixTree
from pagecore.storage.specs.attended import attended_keys
from tests.capabilities import require
from tests.faults import is_full
from tests.machines import drawn
from tests.tiers.events.following import BLOCK, MODELS, contents, make, state_of, tree_of

require("msgspec")
require("zmq")

from pagecore.tiers.events import EventPublisher, Mirror  # noqa: E402
from pagecore.tiers.events.wire import decode_batch  # noqa: E402

NUMBERS = itertools.count()  # a closed address is free again after a while
PREFIX = [int(bit) for bit in "0100110100011011101001011100101101001110"]
namespaces = st.sampled_from([None, None, "adapter", ("tenant", 7)])


class EventMachine(RuleBasedStateMachine):
    """A publisher that publishes when asked; one mirror applies every batch, others start from a snapshot."""

    @initialize(model=st.sampled_from(sorted(MODELS)))
    def start(self, model):
        self.cache = make(model)
        tree = tree_of(self.cache)
        options = {"windows": tree.windows, "chunks": tree.chunks, "sinks": tree.sinks}
        if "state" in tree.components:
            options |= {"states": True, "state_interval": tree.state_interval}
        self.host = RadixTree(BLOCK, full=len(self.lanes_of_full()), **options)
        self.next_id = 1
        self.publisher = EventPublisher(
            self.cache,
            [(self.host, "CPU")],
            endpoint=f"inproc://machine-{next(NUMBERS)}",
            interval=None,
            max_bytes=3000,
        )
        self.mirror, self.late = Mirror(), None
        self.at, self.seen = {0: contents(self.publisher)}, -1
        self.live, self.keys = [], []
        self.apply_batches()

    def lanes_of_full(self):
        return [g for g in self.cache._parts.token_groups if not attended_keys(g.spec).is_limited]

    def teardown(self):
        if hasattr(self, "publisher"):
            self.publisher.close()

    @rule(size=st.integers(0, 40), changed=st.integers(0, 39), namespace=namespaces, spanned=st.integers(0, 9))
    def add(self, size, changed, namespace, spanned):
        if len(self.live) == 3:
            return
        tokens = PREFIX[:size]
        if changed < size:
            tokens[changed] = 2
        spans = [(3, 9, b"cat")] if spanned == 0 else None
        self.keys.append((tokens, {"namespace": namespace, "spans": spans}))
        self.live.append(self.cache.add_sequence(tokens, **self.keys[-1][1]))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 20))
    def step(self, data, count):
        sequence = data.draw(st.sampled_from(self.live))
        count = min(count, 60 - sequence.num_computed_tokens)
        if count <= 0:
            return
        more = max(0, sequence.num_computed_tokens + count - sequence.num_tokens)
        self.cache.append_tokens([sequence], [PREFIX[:more]])
        try:
            batch = self.cache.prepare([sequence], count)
        except OutOfBlocks:
            return
        self.cache.commit(batch)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove(self, data):
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.cache.remove(sequence)

    @rule()
    def clear(self):
        self.cache.clear_prefix_cache()

    @rule(size=st.integers(0, 40))
    def store_on_host(self, size):
        lanes = []
        for component in range(len(self.lanes_of_full()) + len(self.host.windows)):
            lanes.append(range(self.next_id, self.next_id + size // BLOCK))
            self.next_id += (size // BLOCK) * (component >= 0)
        self.host.insert(PREFIX[:size], lanes[0] if len(lanes) == 1 else tuple(lanes))

    @rule(data=st.data(), amount=st.integers(1, 5))
    def evict_on_host(self, data, amount):
        self.host.evict(data.draw(st.sampled_from(self.host.components)), amount)

    @rule()
    def publish(self):
        self.at[self.publisher.publish()] = contents(self.publisher)
        self.apply_batches()
        self.check_matches()

    @precondition(lambda self: hasattr(self, "publisher"))
    @rule()
    def take_a_snapshot(self):
        frames = list(self.publisher._state(b""))
        self.late = Mirror()
        self.late.load(frames[0][0], [decode_batch(payload) for _, payload in frames])
        self.at[frames[0][0]] = contents(self.publisher)
        assert state_of(self.late) == self.at[frames[0][0]]
        self.apply_batches()

    def apply_batches(self):
        """Apply what was published to both mirrors; compare the state after each number with that of the trees."""
        for number, payload in self.publisher._batches:
            if number <= self.seen:
                continue
            self.seen = number
            assert self.mirror.apply(number, decode_batch(payload))
            if self.late is not None:
                is_new = number > self.late.sequence
                assert self.late.apply(number, decode_batch(payload)) == is_new
            if number in self.at:
                assert state_of(self.mirror) == self.at[number]
                assert self.late is None or state_of(self.late) == self.at[number]
        assert self.seen == self.publisher.stats().sequence

    def check_matches(self):
        """Compare what a router finds with what the tree finds."""
        tree = tree_of(self.cache)
        for tokens, options in self.keys[-4:]:
            assert self.mirror.match(tokens, **options) == tree.match(tokens, **options).num_tokens


TestEvents = pytest.mark.slow(drawn(EventMachine))
TestEvents.settings = settings(max_examples=40 if is_full() else 24, stateful_step_count=30, deadline=None)
