"""Controls of the benches: plain pools, tables and slots return the ids that the index returns."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.index.controls import DequePool, HeapPool, ListPool, NumpyPool, NumpySlots, NumpyTables
from bench.serving.synthetic_trace import write_trace
from pagecore import BlockPool, BlockTables
from pagecore.index import SlotAllocator
from pagecore.serving.replay.trace import read_trace, scan_trace

POOLS = [(ListPool, "lifo"), (NumpyPool, "lifo"), (DequePool, "fifo"), (HeapPool, "address")]


@pytest.mark.parametrize(("control", "order"), POOLS)
def test_plain_pools_allocate_the_blocks_of_block_pool(control, order):
    random = np.random.default_rng(0)
    ours, theirs = BlockPool(64, order=order), control(64)
    held = []
    for _ in range(200):
        if held and random.random() < 0.5:
            blocks, other = held.pop(random.integers(len(held)))
            ours.free(blocks)
            theirs.free(other)
        elif ours.num_free:
            count = int(random.integers(1, ours.num_free + 1))
            blocks, other = ours.allocate(count), theirs.allocate(count)
            np.testing.assert_array_equal(blocks, other)
            held.append((blocks, other))


def test_numpy_tables_return_the_slots_of_block_tables():
    random = np.random.default_rng(1)
    ours = BlockTables(BlockPool(400), block_sizes=4, max_sequences=5, max_blocks_per_sequence=60)
    theirs = NumpyTables(NumpyPool(400), 4, 6, 60)
    rows = np.array([ours.add() for _ in range(5)], np.int32)
    out, other = np.empty(64, np.int64), np.empty(64, np.int64)
    for step in range(100):
        some = random.permutation(rows)[: random.integers(1, 6)]
        counts = random.integers(1, 12, len(some)).astype(np.int32)
        np.testing.assert_array_equal(ours.extend(some, counts, out=out), theirs.extend(some, counts, other))
        if step % 10 == 9:
            for _ in range(len(rows)):
                ours.remove(rows[:1])
                theirs.remove(int(rows[0]))
                rows = np.append(rows[1:], np.int32(ours.add()))


def test_numpy_slots_return_the_slots_of_slot_allocator():
    random = np.random.default_rng(2)
    ours, theirs = SlotAllocator(BlockPool(500), 4), NumpySlots(NumpyPool(500), 4)
    lengths, last = np.zeros(6, np.int64), np.full(6, -1, np.int64)
    for _ in range(30):
        grown = lengths + random.integers(1, 9, 6)
        slots = ours.extend(lengths, grown, last)
        np.testing.assert_array_equal(slots, theirs.extend(lengths, grown, last))
        last = slots[np.cumsum(grown - lengths) - 1]
        lengths = grown + 1
        slots = ours.decode(lengths, last)
        np.testing.assert_array_equal(slots, theirs.decode(lengths, last))
        last = slots


def test_the_checked_control_refuses_a_double_free():
    pool = NumpyPool(8)
    blocks = pool.allocate(3)
    pool.free(blocks)
    with pytest.raises(ValueError, match="free"):
        pool.free(blocks)


def test_the_synthetic_trace_is_a_trace_and_the_same_each_time(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        write_trace(path, 200)
    assert first.read_bytes() == second.read_bytes()
    assert scan_trace(first).num_requests == 200
    requests = list(read_trace(first))
    seen, shared = set(), 0
    for request in requests:
        shared += any(block in seen for block in request.hash_ids)
        seen.update(request.hash_ids)
    assert 20 < shared < 120
    assert set(json.loads(first.read_text().splitlines()[0])) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
    }
