"""Random prompts longer than the host, with faults: every leased block comes back, and no wrong byte is published."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from pagecore.tiers.keys import lane_keys
from pagecore.tiers.manager.stores import StoreSide
from pagecore.tiers.manager.writing.stream_parts import StreamedPrefix
from tests.faults import is_full
from tests.machines import drawn
from tests.tiers.manager.plain_device import PlainDevice, StreamingHost
from tests.tiers.manager.plain_host import payload
from tests.tiers.manager.request_rules import NAMESPACES, RequestRules, prompts
from tests.tiers.manager.request_world import BLOCK, FINGERPRINT, chain_of
from tests.tiers.manager.scripted_store import ScriptedStore

PROMPTS = prompts(12)


class StreamMachine(RequestRules):
    def __init__(self):
        super().__init__()
        self.owners, self.prompts = 0, []

    @initialize(
        kind=st.sampled_from([{}, {"windows": (6,)}, {"num_full": 2}]),
        slots=st.integers(1, 8),
        num_slots=st.integers(1, 5),
        device_blocks=st.integers(4, 40),
        stores=st.integers(1, 2),
        chunk_bytes=st.sampled_from([256, 600, 1 << 20]),
        min_tokens=st.sampled_from([1, 5]),
        late_copies=st.booleans(),
    )
    def build(self, kind, slots, num_slots, device_blocks, stores, chunk_bytes, min_tokens, late_copies):
        self.device = PlainDevice(device_blocks)
        self.host = StreamingHost(self.device, late_copies=late_copies, block_size=BLOCK, slots=slots, **kind)
        self.stores = [ScriptedStore(f"s{number}") for number in range(stores)]
        self.num_slots = min(num_slots, slots)
        self.side = StoreSide(
            self.device,
            self.host,
            self.stores,
            fingerprint=FINGERPRINT,
            tree_lanes=self.host.lanes,
            num_origins=64,
            min_tokens=min_tokens,
            chunk_bytes=chunk_bytes,
            num_slots=self.num_slots,
            clock=lambda: self.now,
        )

    def teardown(self):
        if not hasattr(self, "side"):
            return
        self.host.fails = 0
        for _ in range(2000):
            self.host.finish_copies()
            for store in self.stores:
                store.refuses = None
                store.finish_all()
            self.side.poll()
            if self.side.is_at_rest and all(request.is_retired for request in self.requests):
                break
        assert all(request.has_ended and request.is_retired for request in self.requests)
        assert not self.host.leases
        assert self.side.is_at_rest
        self.now += 100
        self.side.poll()
        assert not self.host.pins
        assert all(not store.holds for store in self.stores)
        self.check()
        self.side.close(0.0)

    @rule(tokens=PROMPTS, namespace=NAMESPACES, deadline=st.sampled_from([None, None, 0.0, 1.0]))
    def request(self, tokens, namespace, deadline):
        request = self.side.request(tokens, namespace=namespace, deadline=deadline)
        self.requests.append(request)
        if request.has_ended:
            self.verify(request)

    @rule(tokens=PROMPTS, namespace=NAMESPACES, same=st.booleans())
    def compute(self, tokens, namespace, same):
        """Compute a prompt on the device, back up what the host takes, and stream the rest."""
        self.device.fill(tokens, namespace)
        there = self.host.fill(tokens, namespace=namespace)
        if there:
            self.side.write([SimpleNamespace(tokens=tokens, namespace=namespace, spans=None, start=0, stop=there)])
        self.owners += not same
        there = min(there, len(tokens) // BLOCK * BLOCK)
        self.side.stream(self.owners, StreamedPrefix(tokens[: len(tokens) // BLOCK * BLOCK], namespace, None), there, 0)
        self.prompts.append((tokens, namespace))

    @rule()
    def remove_owner(self):
        self.side.streams.forget_owner(self.owners)

    @rule()
    def poll(self):
        for request in self.side.poll():
            self.verify(request)

    @rule()
    def finish_copies(self):
        self.host.finish_copies()

    def verify(self, request):
        """Check that the prefix of a request that has just ended is there."""
        prefix = {"namespace": request.namespace, "max_tokens": request.max_tokens}
        found = max(self.host.match(request.tokens, **prefix), self.device.match_length(request.tokens, **prefix))
        assert found >= request.num_tokens
        assert sum(request.loaded_tokens.values()) <= request.num_tokens

    @rule()
    def finish_all(self):
        for store in self.stores:
            store.finish_all()
        self.poll()

    @rule(count=st.integers(1, 20))
    def evict(self, count):
        self.device.evict(count)
        for lane in range(self.host.num_lanes):
            self.host.evict(lane, count)

    @rule(count=st.integers(0, 2))
    def fail_copies(self, count):
        self.host.fails = count

    @invariant()
    def check(self):
        if hasattr(self, "side"):
            self.host.check()
            self.device.check()
            self.side.check_invariants()
            assert self.side.num_leases == len(self.host.leases)
            assert self.side.num_pins == len(self.host.pins)
            assert self.side.streams.stats().num_leased_blocks <= self.num_slots
            for store in self.stores:
                for tokens, namespace in self.prompts[-2:]:
                    self.check_store(store, tokens, namespace)

    def check_store(self, store, tokens, namespace):
        """Check that the entries that a store has of a prompt are those of its blocks."""
        chain = chain_of(tokens, namespace)
        for lane in range(self.host.num_lanes):
            for index, key in enumerate(lane_keys(chain, lane)):
                content = store.entries.get(bytes(key))
                before = tokens[: (index + 1) * BLOCK].tolist()
                nbytes = self.host.payload_bytes[lane]
                assert content in (None, bytes(payload(namespace, before, lane, nbytes)))


TestStreams = pytest.mark.slow(drawn(StreamMachine))
TestStreams.settings = settings(max_examples=2000 if is_full() else 24, stateful_step_count=40, deadline=None)
