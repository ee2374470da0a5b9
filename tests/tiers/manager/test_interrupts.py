"""Interrupts of requests and polls: every batch and request ends, and nothing stays pinned."""

from functools import partial

import numpy as np
import pytest

from tests.faults import PAGECORE, is_full, raise_at, runs
from tests.tiers.manager.served import Served
from tests.tiers.memory_store import MemoryStore

PROMPT = np.arange(25, dtype=np.int32)
STRIDE = 1 if is_full() else 7


@pytest.fixture(scope="module")
def data():
    """Entries of the prompt in a store."""
    entries = {}
    with Served([MemoryStore(data=entries)]) as served:
        served.serve(PROMPT)
        served.flush()
    return entries


def poll_until_loaded(tiers, store):
    for _ in range(3):  # look-up, load, publication
        tiers.poll()
        store.release()


def ends_of(tiers, store):
    """Let all batches end; return what is left of them."""
    store.manual = False
    store.release()
    assert tiers.drain(2.0), "a batch has no end"
    tiers.poll()
    tiers.check_invariants()
    stats = tiers.stats()
    return tiers.host.num_holds, tiers.host.num_leases, stats.requests.num_open


@pytest.mark.slow
@pytest.mark.parametrize("name", ["request", "load", "write"])
def test_an_interrupt_leaves_no_batch_and_no_pin(data, name):
    def interrupted(n):
        nonlocal served, store, request
        store = MemoryStore(data=dict(data), manual=True)
        served = Served([store], pin_seconds=0.0)
        if name == "request":
            call = partial(served.tiers.request, PROMPT)
        else:
            request = served.tiers.request(PROMPT) if name == "load" else None
            if name == "write":
                served.compute(PROMPT + 100)
            call = partial(poll_until_loaded, served.tiers, store)
        return raise_at(call, n, PAGECORE / "tiers" / "manager")

    served = store = request = None
    for run in runs(interrupted, stride=STRIDE):
        assert ends_of(served.tiers, store) == (0, 0, 0), run.where
        if name != "request":  # a look-up whose ticket was lost holds what it has found
            assert not store.holds, run.where
        if name == "load":
            assert request.has_ended, run.where
            served.compute(PROMPT)
        served.close()
