"""Random requests, copies, faults and evictions: nothing wrong is published, and nothing is lost."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from pagecore.tiers.manager.stores import StoreSide
from tests.faults import is_full
from tests.machines import drawn
from tests.tiers.manager.plain_host import NO_DEVICE, PlainHost
from tests.tiers.manager.request_rules import NAMESPACES, RequestRules, prompts
from tests.tiers.manager.request_world import BLOCK, FINGERPRINT
from tests.tiers.manager.scripted_store import ScriptedStore

PROMPTS = prompts(5)


class RequestMachine(RequestRules):
    @initialize(
        kind=st.sampled_from([{}, {"windows": (6,)}, {"states": True}, {"windows": (4, 9), "states": True}]),
        slots=st.integers(4, 20),
        stores=st.integers(1, 3),
        chunk_bytes=st.sampled_from([256, 600, 1 << 20]),
        min_tokens=st.sampled_from([1, 5]),
    )
    def build(self, kind, slots, stores, chunk_bytes, min_tokens):
        self.host = PlainHost(block_size=BLOCK, slots=slots, **kind)
        self.stores = [ScriptedStore(f"s{number}") for number in range(stores)]
        self.side = StoreSide(
            NO_DEVICE,
            self.host,
            self.stores,
            fingerprint=FINGERPRINT,
            tree_lanes=self.host.lanes,
            min_tokens=min_tokens,
            chunk_bytes=chunk_bytes,
            clock=lambda: self.now,
        )

    def teardown(self):
        if not hasattr(self, "side"):
            return
        for _ in range(4):
            for store in self.stores:
                store.finish_all()
            self.side.poll()
        for request in self.requests:
            assert request.has_ended
            assert request.is_retired
        assert not self.host.leases
        self.now += 100
        self.side.poll()
        assert not self.host.pins
        assert all(not store.holds for store in self.stores)
        self.check()
        self.side.close(0.0)

    @rule(tokens=PROMPTS, namespace=NAMESPACES, deadline=st.sampled_from([None, 0.0, 1.0]))
    def request(self, tokens, namespace, deadline):
        request = self.side.request(tokens, namespace=namespace, deadline=deadline)
        self.requests.append(request)
        if request.has_ended:
            self.verify(request)

    @rule(tokens=PROMPTS, namespace=NAMESPACES)
    def back_up(self, tokens, namespace):
        stop = self.host.fill(tokens, namespace=namespace)
        if stop:
            self.side.write([SimpleNamespace(tokens=tokens, namespace=namespace, spans=None, start=0, stop=stop)])

    @rule()
    def poll(self):
        for request in self.side.poll():
            self.verify(request)

    def verify(self, request):
        """Check that the prefix of a request that has just ended is there and pinned."""
        found = self.host.match(request.tokens, namespace=request.namespace, max_tokens=request.max_tokens)
        assert found >= request.num_tokens
        assert request.num_tokens >= request.num_host_tokens
        assert sum(request.loaded_tokens.values()) <= request.num_tokens

    @rule(count=st.integers(1, 8))
    def evict(self, count):
        for lane in range(self.host.num_lanes):
            self.host.evict(lane, count)

    @invariant()
    def check(self):
        if hasattr(self, "side"):
            self.host.check()
            self.side.check_invariants()
            assert self.side.num_leases == len(self.host.leases)
            assert self.side.num_pins == len(self.host.pins)


TestRequests = pytest.mark.slow(drawn(RequestMachine))
TestRequests.settings = settings(max_examples=2000 if is_full() else 24, stateful_step_count=40, deadline=None)
