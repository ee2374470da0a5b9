"""Power failures at the level of sectors: no wrong block is served, and without the sums wrong blocks would be."""

import os

import numpy as np
import pytest

from tests.tiers.disk.crash import Reader, Recorder, crashed
from tests.tiers.disk.kit import Memory, content, finish, keys_of, open_store, put

# 1,600 failures at least; PAGECORE_FAULTS=full takes ten times as many.
NUM_CRASHES = 1600 if os.environ.get("PAGECORE_FAULTS") != "full" else 16_000
SLOTS, NUMBERS = 36, 90
PAYLOAD = 6000


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A file before a workload, the writes of the workload, and the payload of each key."""
    folder = tmp_path_factory.mktemp("history")
    ops = Recorder()
    with open_store(folder, SLOTS, (PAYLOAD,)) as store:
        put(store, range(20))
        path = store.path / "lane0-000.slab"
    before = path.read_bytes()
    with open_store(folder, SLOTS, (PAYLOAD,), threads=4, file_ops=ops.address) as store:
        rng = np.random.default_rng(11)
        tickets = []
        for _ in range(60):
            keys = keys_of(store, rng.choice(NUMBERS, 5, replace=False))
            memory = Memory(5, PAYLOAD).fill(keys)
            tickets.append((store.submit_store(keys, memory.pieces), memory))
            if len(tickets) == 3:  # three batches at once
                for ticket, _ in tickets:
                    finish(store, ticket)
                tickets = []
        store.check_invariants()
        all_keys = keys_of(store, range(NUMBERS))
    assert len(ops.writes) > 200
    return before, ops.writes, {key.tobytes(): content(key, PAYLOAD).tobytes() for key in all_keys}


def wrong(served, expected):
    return sum(row != expected[key] for key, row in served.items())


def test_no_crash_makes_a_store_serve_a_wrong_block(history, tmp_path):
    """The store opens what a failure left, and serves whole blocks only; the twin with sums serves the same keys."""
    before, writes, expected = history
    with open_store(tmp_path, SLOTS, (PAYLOAD,)) as store:
        path = store.path / "lane0-000.slab"
        keys = keys_of(store, range(NUMBERS))
    memory = Memory(NUMBERS, PAYLOAD)
    rng = np.random.default_rng(5)
    num_served = num_lost = num_wrong_without_sums = 0
    for crash in range(NUM_CRASHES):
        image = crashed(before, writes, rng)
        path.write_bytes(image)
        with open_store(tmp_path, SLOTS, (PAYLOAD,), threads=1) as store:
            num_entries = len(store)
            memory.rows[:] = 0
            done = finish(store, store.submit_load(keys, memory.pieces))
        served = {keys[i].tobytes(): memory.rows[i, :PAYLOAD].tobytes() for i in np.flatnonzero(done.ok)}
        assert wrong(served, expected) == 0, crash
        num_served += len(served)
        num_lost += num_entries - len(served)
        num_wrong_without_sums += wrong(Reader(image, has_sums=False).served, expected)
        if crash % 16 == 0:
            assert served == Reader(image, has_sums=True).served, crash
    assert num_served > 10 * NUM_CRASHES, "the failures leave nothing to serve"
    assert num_lost > NUM_CRASHES / 4, "the failures damage nothing"
    assert num_wrong_without_sums > NUM_CRASHES / 4, "the failures would not be noticed"


def test_without_a_failure_everything_is_there(history, tmp_path):
    before, writes, expected = history
    image = bytearray(before)
    for offset, data in writes:
        image[offset : offset + len(data)] = data
    served = Reader(bytes(image), has_sums=True).served
    assert served == Reader(bytes(image), has_sums=False).served
    assert len(served) == SLOTS
    assert wrong(served, expected) == 0
