"""State machine: the core of a guard over a store with faults, against a plain model.

The machine owns the clock, the hanging batches of the store and the moment of each late write. It checks after each
rule that every ticket ends once, that a payload is delivered whole or reported as missing, that no byte of the caller
changes after a batch has ended, and that transfers which may still write have lost memory to themselves.
"""

import os

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagecore.tiers.guard.batch import Kind, run
from pagecore.tiers.guard.breaker import Breaker
from pagecore.tiers.guard.core import Core
from pagecore.tiers.guard.deadline import Deadline
from tests.tiers.blocks import POISON, Blocks, random_keys
from tests.tiers.memory_store import MemoryStore

NUM_KEYS = 12
NBYTES = 5000
KEYS = random_keys(NUM_KEYS)
CONTENT = np.random.default_rng(1).integers(0, 256, (NUM_KEYS, NBYTES), np.uint8)
FAULTS = st.sampled_from([None, None, None, "error", "gone", "flip", "part", "hang", "hang", "raise"])
CHOSEN = st.lists(st.integers(0, NUM_KEYS - 1), min_size=1, max_size=6, unique=True)
SOON = st.booleans()


class GuardMachine(RuleBasedStateMachine):
    @initialize(verifies=st.booleans(), writes_late=st.booleans(), stubborn=st.booleans(), pages=st.integers(12, 30))
    def start(self, verifies, writes_late, stubborn, pages):
        self.kind = {"verifies": verifies, "writes_late": writes_late, "stubborn": stubborn}
        self.is_direct = verifies and not writes_late
        self.client = MemoryStore(**self.kind)
        self.core = Core(
            self.client, deadline=Deadline(1.0, 1e6), budget_bytes=pages * 4096, breaker=Breaker(first_pause=2.0)
        )
        self.now = 0.0
        self.pending = {}
        self.checked = []
        self.preload()

    def preload(self):
        """Keep every other entry in the store from the beginning."""
        blocks = Blocks(NUM_KEYS // 2, NBYTES)
        blocks.payloads[:] = CONTENT[::2]
        self.core.submit(Kind.STORE, KEYS[::2].copy(), blocks.pieces(), self.now)
        self.work()
        (done,) = self.core.completions.take()
        assert done.ok.all()

    def submit(self, kind, chosen, blocks, fault, is_soon):
        self.client.faults[kind.value].clear()
        if fault is not None:
            self.client.inject(kind.value, fault)
        pieces = None if blocks is None else blocks.pieces()
        ticket = self.core.submit(kind, KEYS[chosen], pieces, self.now)
        self.pending[ticket] = (kind, chosen, blocks)
        if is_soon:
            self.work()

    def work(self):
        """Make progress like the guard's thread, until there is nothing to do."""
        self.core.advance(self.now)
        while (part := self.core.take_job()) is not None:
            run(part, framed=self.core.trailer > 0)
            self.core.end_job(part, self.now)
            self.core.advance(self.now)

    # ---- the caller ----

    @rule(chosen=CHOSEN, fault=FAULTS, is_soon=SOON)
    def look_up(self, chosen, fault, is_soon):
        self.submit(Kind.LOOKUP, chosen, None, fault if fault not in {"flip", "part"} else None, is_soon)

    @rule(chosen=CHOSEN, fault=FAULTS, is_soon=SOON)
    def load(self, chosen, fault, is_soon):
        self.submit(Kind.LOAD, chosen, Blocks(len(chosen), NBYTES), fault, is_soon)

    @rule(chosen=CHOSEN, fault=FAULTS, is_soon=SOON)
    def store(self, chosen, fault, is_soon):
        blocks = Blocks(len(chosen), NBYTES)
        blocks.payloads[:] = CONTENT[chosen]
        self.submit(Kind.STORE, chosen, blocks, fault, is_soon)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data):
        self.core.cancel(data.draw(st.sampled_from(sorted(self.pending))), self.now)

    @rule(chosen=CHOSEN, operation=st.sampled_from(list(Kind)), is_late=SOON)
    def give_up(self, chosen, operation, is_late):
        """Submit a batch that hangs, and miss its deadline or cancel it."""
        blocks = None
        if operation is not Kind.LOOKUP:
            blocks = Blocks(len(chosen), NBYTES)
            if operation is Kind.STORE:
                blocks.payloads[:] = CONTENT[chosen]
        self.submit(operation, chosen, blocks, "hang", is_soon=True)
        if is_late:
            self.now += 5.0
            self.core.advance(self.now)
        else:
            self.core.cancel(max(self.pending), self.now)

    # ---- the store ----

    @rule(fault=st.sampled_from([None, None, None, "error", "flip"]))
    def wake_up(self, fault):
        self.client.release(fault=fault)

    @rule()
    def write_late(self):
        self.client.write_late()

    @rule(index=st.integers(0, NUM_KEYS - 1), bit=st.integers(0, 8 * NBYTES - 1))
    def rot(self, index, bit):
        if not self.kind["verifies"] and KEYS[index].tobytes() in self.client.data:
            self.client.rot(KEYS[index], bit)

    # ---- the guard's thread ----

    @rule()
    def copy(self):
        part = self.core.take_job()
        if part is not None:
            run(part, framed=self.core.trailer > 0)
            self.core.end_job(part, self.now)

    @rule(seconds=st.sampled_from([0.01, 5.0, 5.0, 1e6, -50.0]))
    def time_passes(self, seconds):
        self.now = max(0.0, self.now + seconds)
        self.core.advance(self.now)

    @rule()
    def reopen(self):
        if self.core.wants_reopen(self.now):
            client = self.core.abandon("reopened", self.now)
            client.close()
            self.core.destroyed(client, self.now)
            assert self.core.staging.lost_bytes == 0
            self.client = MemoryStore(data=client.data, **self.kind)
            self.core.adopt(self.client)

    # ---- what must hold ----

    @invariant()
    def every_end_is_right(self):
        for done in self.core.completions.take():
            kind, chosen, blocks = self.pending.pop(done.ticket)
            assert done.ok.shape == (len(chosen),)
            if kind is Kind.LOAD:
                for index, block in enumerate(chosen):
                    if done.ok[index]:
                        np.testing.assert_array_equal(blocks.payloads[index], CONTENT[block])
                    elif not self.is_direct:
                        assert (blocks.bytes[index] == POISON).all()
            if kind is Kind.STORE and self.is_direct:
                for block in np.array(chosen, int)[done.ok]:
                    content = CONTENT[block].tobytes()
                    assert self.client.data.get(KEYS[block].tobytes(), content) == content
            if blocks is not None:
                self.checked.append((blocks, blocks.bytes.copy()))

    @invariant()
    def ended_memory_is_left_alone(self):
        for blocks, snapshot in self.checked:
            np.testing.assert_array_equal(blocks.bytes, snapshot)

    @invariant()
    def late_transfers_have_lost_memory_to_themselves(self):
        staging = self.core.staging
        for transfer in self.client.late if staging is not None else ():
            for address in transfer.pieces[:, 0].tolist():
                assert address in {region.address for region in staging.lost_regions}
        if staging is not None and not self.kind["writes_late"] and not self.client.hanging:
            self.core.advance(self.now)
            assert staging.lost_bytes == 0

    @invariant()
    def the_core_is_consistent(self):
        self.core.check_invariants()
        self.every_end_is_right()
        assert set(self.pending) == {batch.ticket for batch in self.core.batches.values()}

    def teardown(self):
        if not hasattr(self, "core"):
            return
        self.work()
        client = self.core.abandon("closed", self.now)
        client.close()
        self.core.destroyed(client, self.now)
        while (part := self.core.take_job()) is not None:
            run(part, framed=self.core.trailer > 0)
            self.core.end_job(part, self.now)
        self.every_end_is_right()
        assert not self.pending
        assert not self.core.in_store
        if self.core.staging is not None:
            assert self.core.staging.num_regions == 0
            self.core.staging.check_invariants()
            self.core.staging.close()
        self.core.completions.close()


FULL = os.environ.get("PAGECORE_FAULTS") == "full"
GuardMachine.TestCase.settings = settings(
    max_examples=2000 if FULL else 80, stateful_step_count=40, deadline=None, derandomize=not FULL
)
TestGuardMachine = GuardMachine.TestCase
