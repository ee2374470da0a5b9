"""Power failures at the level of sectors: no wrong block is served, and without the sums wrong blocks would be."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.disk.crash import History, Reader, Recorder
from tests.tiers.disk.kit import Memory, content, finish, keys_of, open_store, put

# PAGECORE_FAULTS=full takes 16,000 failures.
NUM_CRASHES = 400 if os.environ.get("PAGECORE_FAULTS") != "full" else 16_000
SLOTS, NUMBERS = 36, 90
PAYLOAD = 6000


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """The history of a workload, and the payload of each key."""
    folder = tmp_path_factory.mktemp("history")
    ops = Recorder()
    with open_store(folder, SLOTS, (PAYLOAD,)) as store:
        put(store, range(20))
        path = store.path / "lane0-000.slab"
    before = path.read_bytes()
    with open_store(folder, SLOTS, (PAYLOAD,), threads=4, ops=ops) as store:
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
    return History(before, ops.writes), {key.tobytes(): content(key, PAYLOAD).tobytes() for key in all_keys}


@pytest.fixture
def folder():
    """A folder in memory if there is one, so that the disk of the machine does not take part."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


def wrong(served, expected):
    return sum(row != expected[key] for key, row in served.items())


@pytest.mark.slow
def test_no_crash_makes_a_store_serve_a_wrong_block(history, folder):
    """The store opens what a failure left, and serves whole blocks only; the twin with sums serves the same keys."""
    past, expected = history
    with open_store(folder, SLOTS, (PAYLOAD,)) as store:
        path = store.path / "lane0-000.slab"
        keys = keys_of(store, range(NUMBERS))
    memory = Memory(NUMBERS, PAYLOAD)
    rng = np.random.default_rng(5)
    num_served = num_lost = num_wrong_without_sums = 0
    for crash in range(NUM_CRASHES):
        image = past.crashed(rng)
        path.write_bytes(image)
        with open_store(folder, SLOTS, (PAYLOAD,), threads=1) as store:
            num_entries = store.num_entries
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


def test_without_a_failure_everything_is_there(history):
    past, expected = history
    image = past.complete()
    served = Reader(image, has_sums=True).served
    assert served == Reader(image, has_sums=False).served
    assert len(served) == SLOTS
    assert wrong(served, expected) == 0
