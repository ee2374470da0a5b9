"""Interrupts of calls of a guard: each batch ends by its deadline, and the guard goes on."""

from functools import partial

import pytest

from pagecore.tiers.guard import Breaker, Deadline, Guard
from tests.faults import PAGECORE, is_full, raise_at, runs
from tests.tiers.blocks import random_keys, wait
from tests.tiers.guard.kit import stored
from tests.tiers.memory_store import MemoryStore

KEYS = random_keys(8)
STRIDE = 1 if is_full() else 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lookup", "load", "store", "remove", "poll", "cancel"])
@pytest.mark.parametrize("verifies", [True, False])
def test_an_interrupt_leaves_no_batch_without_an_end(name, verifies, blocks):
    def interrupted(n):
        nonlocal guard
        store, now[0] = MemoryStore(verifies=verifies), 0.0
        breaker = Breaker(failures=1, first_pause=1.0)
        guard = Guard(store, deadline=Deadline(10.0), breaker=breaker, clock=lambda: now[0])
        stored(guard, blocks, KEYS)
        wait(guard, guard.submit_lookup(KEYS))
        store.inject("remove", "error")
        wait(guard, guard.submit_remove(KEYS))
        now[0] = 2.0  # the breaker is half-open: the batch is its probe
        if name in ("poll", "cancel"):
            store.manual = True
            ticket = guard.submit_load(KEYS, blocks.pieces())
            store.manual = False
            call = guard.poll if name == "poll" else partial(guard.cancel, ticket)
        else:
            pieces = [blocks.pieces()] * (name in ("load", "store"))
            call = partial(getattr(guard, f"submit_{name}"), KEYS, *pieces)
        run = raise_at(call, n, PAGECORE / "tiers" / "guard")
        store.release()
        return run

    guard, now = None, [0.0]
    for run in runs(interrupted, stride=STRIDE):
        for now[0] in (100.0, 200.0, 300.0):
            guard.poll()
        assert guard.drain(5.0), run.where
        guard.check_invariants()
        assert not wait(guard, guard.submit_lookup(KEYS)).error, run.where
        guard.close()
