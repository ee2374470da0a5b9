"""Faults of a store reach the caller as a miss or as the right bytes, once and in time."""

import time

import numpy as np
import pytest

from pagecore.tiers.guard import Guard
from tests.tiers.blocks import random_keys, wait
from tests.tiers.guard.kit import NBYTES, SOON, stored
from tests.tiers.memory_store import MemoryStore


@pytest.mark.parametrize("fault", ["error", "raise", "hang"])
def test_a_removal_that_fails_ends_once(kind, fault, blocks):
    store = MemoryStore(**kind)
    keys = random_keys(8)
    with Guard(store, deadline=SOON) as guard:
        stored(guard, blocks, keys)
        store.inject("remove", fault)
        done = wait(guard, guard.submit_remove(keys))
        assert not done.ok.any()
        assert done.error is not None
        assert guard.stats().num_removed == 0
        store.release()
        assert guard.drain(10)
        guard.check_invariants()


def test_a_flipped_bit_is_a_miss_and_is_not_delivered(kind, blocks):
    keys = random_keys(8)
    store = MemoryStore(**kind)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        blocks.poison()
        store.inject("load", "flip")
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        if kind.get("verifies", True):
            assert done.error == "injected: flip"
        else:
            assert "differ from their sums" in done.error
            assert blocks.is_poisoned.all()
            assert guard.health().failed_sums == 8
        assert not done.ok.any()


@pytest.mark.parametrize("byte", [0, NBYTES - 1, NBYTES, NBYTES + 8, NBYTES + 16, NBYTES + 23])
def test_rot_of_payload_or_frame_is_a_miss(byte, blocks):
    keys = random_keys(8)
    store = MemoryStore(verifies=False)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        store.rot(keys[3], 8 * byte + 5)
        blocks.poison()
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert done.ok.tolist() == [True] * 3 + [False] + [True] * 4
        assert blocks.is_poisoned.tolist() == (~done.ok).tolist()


@pytest.mark.parametrize("writes_late", [False, True])
def test_a_damaged_entry_is_deleted_and_can_be_stored_again(blocks, writes_late):
    keys, expected = random_keys(8), blocks.payloads.copy()
    store = MemoryStore(verifies=False, writes_late=writes_late)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        for index in (2, 5):
            store.rot(keys[index], 77)
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.sum() == 6
        limit = time.monotonic() + 20
        while len(store.data) > 6:
            assert time.monotonic() < limit
            time.sleep(0.001)
        assert wait(guard, guard.submit_lookup(keys)).ok.tolist() == [n not in (2, 5) for n in range(8)]
        guard.unlock(keys)
        blocks.payloads[:] = expected
        stored(guard, blocks, keys)
        blocks.poison()
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)
        guard.check_invariants()


@pytest.mark.parametrize("refusal", ["raise", "hang", "cannot"])
def test_a_damaged_entry_that_cannot_be_deleted_is_a_miss_each_time(blocks, refusal):
    keys = random_keys(8)
    store = MemoryStore(verifies=False)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        store.rot(keys[2], 77)
        if refusal == "cannot":
            store.can_remove = False
        else:
            store.inject("remove", refusal, 2)
        for _ in range(2):
            done = wait(guard, guard.submit_load(keys, blocks.pieces()))
            assert done.ok.tolist() == [n != 2 for n in range(8)]
        guard.check_invariants()


def test_an_entry_under_another_key_is_a_miss(blocks):
    keys = random_keys(8)
    store = MemoryStore(verifies=False)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        store.data[keys[0].tobytes()] = store.data[keys[1].tobytes()]
        assert not wait(guard, guard.submit_load(keys[:1], blocks.pieces([0]))).ok.any()


def test_an_entry_that_is_gone_after_its_lookup_is_a_miss_without_an_error(kind, blocks):
    keys = random_keys(8)
    store = MemoryStore(**kind)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        assert wait(guard, guard.submit_lookup(keys)).ok.all()
        store.inject("load", "gone")
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert not done.ok.any()
        assert done.error is None
        assert guard.health().lost_bytes == 0
        assert guard.stats().num_held == 0


COMBINATIONS = [
    (operation, fault)
    for operation in ("lookup", "load", "store")
    for fault in ("error", "raise", "hang", "part")
    if (operation, fault) != ("lookup", "part")  # a lookup has no payload
]


@pytest.mark.parametrize(("operation", "fault"), COMBINATIONS)
def test_each_fault_ends_each_operation_once(kind, operation, fault, blocks):
    keys = random_keys(8)
    store = MemoryStore(**kind)
    with Guard(store, deadline=SOON) as guard:
        stored(guard, blocks, keys)
        blocks.poison()
        other = random_keys(8, 1) if operation == "store" else keys
        store.inject(operation, fault)
        arguments = (other,) if operation == "lookup" else (other, blocks.pieces())
        done = wait(guard, getattr(guard, f"submit_{operation}")(*arguments))
        assert not done.ok.any()
        assert done.error is not None
        assert guard.drain(0)
        store.write_late()
        if operation == "load" and (fault != "part" or not kind.get("verifies", True)):
            assert blocks.is_poisoned.all()
        guard.check_invariants()


def test_a_late_transfer_never_reaches_the_memory_of_the_caller(blocks):
    keys = random_keys(8)
    store = MemoryStore(writes_late=True)
    with Guard(store, deadline=SOON) as guard:
        stored(guard, blocks, keys)
        blocks.poison()
        store.inject("load", "hang")
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert "late" in done.error
        assert guard.health().lost_bytes >= 8 * NBYTES
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()
        expected = blocks.payloads.copy()
        store.data = {key: bytes(len(value)) for key, value in store.data.items()}
        assert store.write_late() == 1
        np.testing.assert_array_equal(blocks.payloads, expected)
