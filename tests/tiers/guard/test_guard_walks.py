"""Random walks: the core of a guard over a store with faults, against a plain model.

A walk owns the clock, the hanging batches of the store and the moment of each late write. After each step it checks
that every ticket ends once, that a payload is delivered whole or reported as missing, that no byte of the caller
changes after a batch has ended, and that transfers which may still write have lost memory to themselves.
"""

import os
import random

import numpy as np
import pytest

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
FAULTS = [None, None, None, "error", "gone", "flip", "part", "hang", "hang", "raise"]
NUM_STEPS = 60
FULL = os.environ.get("PAGECORE_FAULTS") == "full"


class Walk:
    def __init__(self, kind, seed):
        self.rng = random.Random(seed)
        self.kind = {**kind, "stubborn": self.rng.random() < 0.5}
        self.is_direct = kind["verifies"] and not kind["writes_late"]
        self.client = MemoryStore(**self.kind)
        budget = self.rng.randint(12, 30) * 4096
        self.core = Core(
            self.client, deadline=Deadline(1.0, 1e6), budget_bytes=budget, breaker=Breaker(first_pause=2.0)
        )
        self.core.adopt(self.client)
        self.now = 0.0
        self.pending = {}
        self.ended = []
        self.preload()

    def preload(self):
        """Keep every other entry in the store from the beginning."""
        blocks = Blocks(NUM_KEYS // 2, NBYTES)
        blocks.payloads[:] = CONTENT[::2]
        self.core.submit(Kind.STORE, KEYS[::2].copy(), blocks.pieces(), self.now)
        self.work()
        (done,) = self.core.completions.take()
        assert done.ok.all()

    def step(self):
        steps = [self.submit] * 4 + [self.give_up] * 2 + [self.wake_up] * 2
        steps += [self.cancel, self.write_late, self.rot, self.copy, self.time_passes, self.reopen]
        self.rng.choice(steps)()
        self.check()

    # ---- the caller ----

    def submit(self, kind=None, fault=None, *, is_soon=None):
        kind = kind or self.rng.choice(list(Kind))
        fault = fault or self.rng.choice(FAULTS)
        chosen = self.rng.sample(range(NUM_KEYS), self.rng.randint(0, 6))
        blocks = None if kind in (Kind.LOOKUP, Kind.REMOVE) else Blocks(len(chosen), NBYTES)
        if kind is Kind.STORE:
            blocks.payloads[:] = CONTENT[chosen]
        self.client.faults[kind.value].clear()
        if fault is not None and not (blocks is None and fault in {"flip", "part"}):
            self.client.inject(kind.value, fault)
        ticket = self.core.submit(kind, KEYS[chosen], None if blocks is None else blocks.pieces(), self.now)
        self.pending[ticket] = (kind, chosen, blocks)
        if self.rng.random() < 0.5 if is_soon is None else is_soon:
            self.work()

    def give_up(self):
        """Submit a batch that hangs, and miss its deadline or cancel it."""
        self.submit(self.rng.choice(list(Kind)), "hang", is_soon=True)
        if self.rng.random() < 0.5:
            self.now += 5.0
            self.core.advance(self.now)
        else:
            self.core.cancel(max(self.pending), self.now)

    def cancel(self):
        if self.pending:
            self.core.cancel(self.rng.choice(sorted(self.pending)), self.now)

    # ---- the store ----

    def wake_up(self):
        self.client.release(fault=self.rng.choice([None, None, None, "error", "flip"]))

    def write_late(self):
        self.client.write_late()

    def rot(self):
        key = self.rng.choice(list(KEYS))
        if not self.kind["verifies"] and key.tobytes() in self.client.data:
            self.client.rot(key, self.rng.randrange(8 * NBYTES))

    # ---- the guard's thread ----

    def work(self):
        """Make progress until there is nothing to do."""
        self.core.advance(self.now)
        while self.copy():
            self.core.advance(self.now)

    def copy(self):
        part = self.core.take_job()
        if part is not None:
            run(part, framed=self.core.trailer > 0)
            self.core.end_job(part, self.now)
        return part is not None

    def time_passes(self):
        self.now = max(0.0, self.now + self.rng.choice([0.01, 5.0, 5.0, 1e6, -50.0]))
        self.core.advance(self.now)

    def reopen(self):
        if self.core.wants_reopen(self.now):
            client = self.core.abandon("reopened", self.now)
            client.close()
            self.core.destroyed(client, self.now)
            assert self.core.staging.lost_bytes == 0
            self.client = MemoryStore(data=client.data, **self.kind)
            self.core.adopt(self.client)

    # ---- what must hold ----

    def check(self):
        for done in self.core.completions.take():
            self.check_end(done, *self.pending.pop(done.ticket))
        for blocks, snapshot in self.ended:
            np.testing.assert_array_equal(blocks.bytes, snapshot)
        self.core.check_invariants()
        assert set(self.pending) == {batch.ticket for batch in self.core.batches.values()}
        if self.core.staging is not None:
            lost = {region.address for region in self.core.staging.lost_regions}
            assert {int(address) for late in self.client.late for address in late.pieces[:, 0]} <= lost

    def check_end(self, done, kind, chosen, blocks):
        assert done.ok.shape == (len(chosen),)
        for index, block in enumerate(chosen if kind is Kind.LOAD else ()):
            if done.ok[index]:
                np.testing.assert_array_equal(blocks.payloads[index], CONTENT[block])
            elif not self.is_direct:
                assert (blocks.bytes[index] == POISON).all()
        for block in np.array(chosen, int)[done.ok] if kind is Kind.STORE and self.is_direct else ():
            content = CONTENT[block].tobytes()
            assert self.client.data.get(KEYS[block].tobytes(), content) == content
        if blocks is not None:
            self.ended.append((blocks, blocks.bytes.copy()))

    def finish(self):
        """Let the store end everything; then close."""
        self.client.release()
        self.work()
        self.core.advance(self.now)
        self.check()
        if self.core.staging is not None and not self.kind["writes_late"]:
            assert self.core.staging.lost_bytes == 0
            parts = [*self.core.in_store.values(), *self.core.jobs]
            assert self.core.staging.num_regions == sum(len(part.regions or ()) for part in parts)
        client = self.core.abandon("closed", self.now)
        client.close()
        self.core.destroyed(client, self.now)
        while self.copy():
            pass
        self.check()
        assert not self.pending
        assert not self.core.in_store
        if self.core.staging is not None:
            assert self.core.staging.num_regions == 0
            self.core.staging.close()
        self.core.completions.close()


KINDS = {
    "direct": {"verifies": True, "writes_late": False},
    "framed": {"verifies": False, "writes_late": False},
    "late": {"verifies": True, "writes_late": True},
    "framed_late": {"verifies": False, "writes_late": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_walks_with_faults_end_every_batch_once_and_leave_memory_alone(kind):
    for seed in range(1000 if FULL else 12):
        walk = Walk(kind, seed)
        for _ in range(NUM_STEPS):
            walk.step()
        walk.finish()
