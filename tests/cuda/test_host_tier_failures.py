"""Copies of the host tier on CUDA that fail: later ones wait for what was submitted."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from pagecore import SwapSpace
from pagecore.cache.state._state import Held
from pagecore.cache.swap import _swap
from pagecore.errors import DeviceError
from tests.cuda.host_tiers import (
    LAYERS,
    back_up_and_forget,
    check_that_no_copy_is_left,
    computed,
    defer,
    ended,
    make,
    tier_of,
)


class Full(list):
    def append(self, _):
        raise MemoryError("planted")


def note_nothing(tier, call, patch):
    """Let the tier fail to note copies that were submitted."""
    patch.setattr(tier._transfers, "_running", Full())


def record_nothing(tier, call, patch):
    """Let the tier fail to record the event of copies that were submitted."""
    record, records = tier._transfers._recorded, []

    def recorded(stream):
        if len(records) == (call == "promote"):  # a load records an event before the first layer
            raise MemoryError("planted")
        records.append(record(stream))
        return records[-1]

    patch.setattr(tier._transfers, "_recorded", recorded)


@pytest.mark.parametrize("call", ["backup", "spill", "promote"])
@pytest.mark.parametrize(("fault", "pipelined"), [(note_nothing, False), (note_nothing, True), (record_nothing, True)])
def test_a_call_that_fails_after_its_copies_waits_for_them(cuda, monkeypatch, call, fault, pipelined):
    """Its blocks are free again: what others write there would be overwritten by a copy that comes later."""
    cache = make(cuda, LAYERS[:2])
    tier = tier_of(cache, pipelined=pipelined)
    if call == "promote":
        back_up_and_forget(cuda, cache, tier)
    else:
        sequence, _ = computed(cuda, cache, range(13))
        if call == "spill":
            cache.remove(sequence)
    defer(cuda)
    calls = {
        "backup": lambda: tier.backup(sequence),
        "spill": lambda: tier.spill([3]),
        "promote": lambda: tier.promote(range(13)),
    }
    waits = cuda.runtime.counts["synchronizes"]
    with monkeypatch.context() as patch:
        fault(tier, call, patch)
        with pytest.raises(MemoryError, match="planted"):
            calls[call]()
    assert cuda.runtime.counts["synchronizes"] > waits
    check_that_no_copy_is_left(cuda, cache, tier)
    cache.check_invariants()
    tier.check_invariants()
    tier.close()


def test_later_steps_wait_for_a_load_whose_publication_failed(cuda, monkeypatch):
    cache = make(cuda, LAYERS[:2])
    tier = tier_of(cache, pipelined=True)
    back_up_and_forget(cuda, cache, tier)
    defer(cuda)
    promote = tier._transfers.promote

    def fails(pairs, hold):
        promote(pairs, hold)
        raise DeviceError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(tier._transfers, "promote", fails)
        with pytest.raises(DeviceError, match="planted"):
            tier.promote(range(13))
    check_that_no_copy_is_left(cuda, cache, tier)
    tier.poll()
    tier.check_invariants()
    tier.close()


@pytest.mark.parametrize("call", ["promote", "deliver"])
@pytest.mark.parametrize("error", [DeviceError, KeyboardInterrupt])
def test_no_thread_takes_the_blocks_of_a_failed_load_before_steps_wait_for_it(cuda, monkeypatch, call, error):
    cache = make(cuda, LAYERS[:2])
    tier = tier_of(cache, pipelined=True)
    back_up_and_forget(cuda, cache, tier)
    promote, await_arrivals, state = tier._transfers.promote, cache._parts.store.await_arrivals, cache._parts.state
    locked, others = [], []

    def fails(pairs, hold):
        promote(pairs, hold)
        raise error("planted")

    def take_lock():
        with Held(state.lock):
            locked.append("another thread")

    def waits():
        others.append(threading.Thread(target=take_lock))
        others[0].start()
        others[0].join(0.05)
        await_arrivals()
        locked.append("this thread")

    monkeypatch.setattr(tier._transfers, "promote", fails)
    monkeypatch.setattr(cache._parts.store, "await_arrivals", waits)
    lease = tier.reserve([[0, 1, 2]])
    load = {
        "promote": partial(tier.promote, range(13)),
        "deliver": partial(tier.deliver, lease, range(13), ok=[[True] * 3]),
    }
    with pytest.raises(error, match="planted"):
        load[call]()
    lease.release()
    others[0].join()
    assert locked == ["this thread", "another thread"]
    assert tier.stats().num_failed == 1
    ended(tier)
    tier.check_invariants()
    tier.close()


def test_a_lease_waits_for_the_copies_of_a_swap_that_failed(cuda, monkeypatch):
    cache = make(cuda, LAYERS[:1])
    tier = tier_of(cache)
    space = SwapSpace(cache, host=tier)
    sequence, kept = computed(cuda, cache, range(13))
    defer(cuda)
    transfer, planes = _swap.transfer_blocks, []

    def fails(*arrays, **options):
        planes.append(arrays)
        if len(planes) == 2:
            raise DeviceError("planted")
        transfer(*arrays, **options)

    with monkeypatch.context() as patch:
        patch.setattr(_swap, "transfer_blocks", fails)
        with pytest.raises(DeviceError, match="planted"):
            cache.swap_out([sequence], space)
    with tier.reserve([range(4)]):
        tier.pool.memory.tensor("cpu").numpy()[...] = 7
        cuda.runtime.finish()
        assert (tier.pool.memory.tensor("cpu").numpy() == 7).all()
    cache.check_invariants()
    tier.check_invariants()
    tier.close()
    del kept
